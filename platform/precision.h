// The number format of a build (§5: the paper trains in mixed precision): PRECISION=fp32 (the default), bf16 or fp16.
//
// `real` is the type of the weights that a layer multiplies by, of activations, of their gradients and of the messages
// that carry them. Whatever the format, kernels compute in fp32, GEMMs accumulate in fp32, and fp32 are: the master
// weights that the optimizer updates, the parameters' gradients, LayerNorm's and softmax's statistics, and the losses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#if defined(PRECISION_BF16)
using real = __nv_bfloat16;
constexpr const char* kPrecision = "bf16";
#elif defined(PRECISION_FP16)
using real = __half;
constexpr const char* kPrecision = "fp16";
#else
using real = float;
constexpr const char* kPrecision = "fp32";
#endif

constexpr bool kMixed = !std::is_same_v<real, float>;
// fp16 has 5 bits of exponent: small gradients vanish unless the loss is scaled up
constexpr bool kScalesLoss = std::is_same_v<real, __half>;
