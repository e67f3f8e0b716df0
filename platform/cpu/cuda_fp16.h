// IEEE half precision on a machine without a GPU: 5 bits of exponent, 10 of fraction. A type to store; arithmetic is in
// float.
#pragma once

struct __half {
    _Float16 value = 0;

    __half() = default;
    __half(float x) : value(_Float16(x)) {}
    operator float() const { return float(value); }
};
