// IEEE half precision on a machine without a GPU: 5 bits of exponent, 10 of fraction. A type to store; arithmetic is in
// float.
#pragma once

struct __half {
#ifdef __clang__  // has _Float16 only where the processor computes in it; `make fuzz` compiles with clang
    using Stored = __fp16;
#else
    using Stored = _Float16;
#endif
    Stored value = 0;

    __half() = default;
    __half(float x) : value(Stored(x)) {}
    operator float() const { return float(value); }
};
