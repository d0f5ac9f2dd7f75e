// The quantile function of the standard normal distribution, with the same bits on a CPU and on a
// GPU.
//
// M. J. Wichura: Algorithm AS 241: The Percentage Points of the Normal Distribution. Applied
// Statistics 37 (1988), 477-484, routine PPND16: about 16 digits for p from 1e-316 to 1 - 1e-16.
//
// Each product that is added to a sum is an explicit fused multiply-add, so that compilers have no
// choice. All other operations are IEEE 754 division and square root, and the logarithm below.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/macros.h"

namespace torchrec_hkv {

HKV_HOST_DEVICE uint64_t double_bits(double x) {
#ifdef __CUDA_ARCH__
  return static_cast<uint64_t>(__double_as_longlong(x));
#else
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

HKV_HOST_DEVICE double bits_double(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __longlong_as_double(static_cast<long long>(bits));
#else
  double x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

// The natural logarithm of a normal number x > 0, within 1e-15 of its value where x is not near 1.
// x = 2^e * m with m from sqrt(1/2) to sqrt(2), and log(m) = 2 atanh(s) with s = (m - 1) / (m + 1).
HKV_HOST_DEVICE double portable_log(double x) {
  constexpr uint64_t kSqrtHalf = 0x3fe6a09e00000000ull;  // bits of nearly sqrt(1/2)
  const uint64_t above = double_bits(x) - kSqrtHalf;
  const int64_t exponent = static_cast<int64_t>(above) >> 52;
  const double m = bits_double((above & 0xfffffffffffffull) + kSqrtHalf);
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  double tail = 1.0 / 23.0;
  tail = fma(tail, s2, 1.0 / 21.0);
  tail = fma(tail, s2, 1.0 / 19.0);
  tail = fma(tail, s2, 1.0 / 17.0);
  tail = fma(tail, s2, 1.0 / 15.0);
  tail = fma(tail, s2, 1.0 / 13.0);
  tail = fma(tail, s2, 1.0 / 11.0);
  tail = fma(tail, s2, 1.0 / 9.0);
  tail = fma(tail, s2, 1.0 / 7.0);
  tail = fma(tail, s2, 1.0 / 5.0);
  tail = fma(tail, s2, 1.0 / 3.0);
  const double twice = s + s;
  const double log_m = fma(twice * s2, tail, twice);
  return fma(static_cast<double>(exponent), 0.693147180559945309417232, log_m);
}

// c7 r^7 + ... + c0.
HKV_HOST_DEVICE double polynomial(double r, double c7, double c6, double c5, double c4, double c3,
                                  double c2, double c1, double c0) {
  return fma(fma(fma(fma(fma(fma(fma(c7, r, c6), r, c5), r, c4), r, c3), r, c2), r, c1), r, c0);
}

// For p with 0 < p < 1.
HKV_HOST_DEVICE double inverse_normal(double p) {
  const double q = p - 0.5;
  if (fabs(q) <= 0.425) {
    const double r = fma(-q, q, 0.180625);
    const double top =
        polynomial(r, 2.5090809287301226727e+3, 3.3430575583588128105e+4, 6.7265770927008700853e+4,
                   4.5921953931549871457e+4, 1.3731693765509461125e+4, 1.9715909503065514427e+3,
                   1.3314166789178437745e+2, 3.3871328727963666080e+0);
    const double bottom =
        polynomial(r, 5.2264952788528545610e+3, 2.8729085735721942674e+4, 3.9307895800092710610e+4,
                   2.1213794301586595867e+4, 5.3941960214247511077e+3, 6.8718700749205790830e+2,
                   4.2313330701600911252e+1, 1.0);
    return q * top / bottom;
  }
  double r = sqrt(-portable_log(q < 0.0 ? p : 1.0 - p));
  double top;
  double bottom;
  if (r <= 5.0) {
    r -= 1.6;
    top =
        polynomial(r, 7.74545014278341407640e-4, 2.27238449892691845833e-2,
                   2.41780725177450611770e-1, 1.27045825245236838258e+0, 3.64784832476320460504e+0,
                   5.76949722146069140550e+0, 4.63033784615654529590e+0, 1.42343711074968357734e+0);
    bottom =
        polynomial(r, 1.05075007164441684324e-9, 5.47593808499534494600e-4,
                   1.51986665636164571966e-2, 1.48103976427480074590e-1, 6.89767334985100004550e-1,
                   1.67638483018380384940e+0, 2.05319162663775882187e+0, 1.0);
  } else {
    r -= 5.0;
    top =
        polynomial(r, 2.01033439929228813265e-7, 2.71155556874348757815e-5,
                   1.24266094738807843860e-3, 2.65321895265761230930e-2, 2.96560571828504891230e-1,
                   1.78482653991729133580e+0, 5.46378491116411436990e+0, 6.65790464350110377720e+0);
    bottom =
        polynomial(r, 2.04426310338993978564e-15, 1.42151175831644588870e-7,
                   1.84631831751005468180e-5, 7.86869131145613259100e-4, 1.48753612908506148525e-2,
                   1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0);
  }
  return (q < 0.0 ? -top : top) / bottom;
}

}  // namespace torchrec_hkv
