// bfloat16 on a machine without a GPU: 8 bits of exponent, 7 of fraction. A type to store; arithmetic is in float.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
    uint16_t bits = 0;

    __nv_bfloat16() = default;
    // Rounds to nearest, ties to even; NaN stays NaN.
    __nv_bfloat16(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, sizeof wide);
        const uint32_t rounded = (wide + 0x7fffu + (wide >> 16 & 1u)) >> 16;
        bits = uint16_t((wide & 0x7fffffffu) > 0x7f800000u ? wide >> 16 | 0x40u : rounded);
    }
    operator float() const {
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
};
