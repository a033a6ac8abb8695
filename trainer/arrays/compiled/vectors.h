/* Vectors of float32 elements, as wide as the processor has them, for the files beside this one. */

#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#endif

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));

typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourI __attribute__((vector_size(16)));

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

INLINE V load(const float *x) { V v; memcpy(&v, x, sizeof v); return v; }
INLINE void store(float *x, V v) { memcpy(x, &v, sizeof v); }
INLINE V fill(float x) { return x - (V){0}; }

/* The last `size` elements of a row, and zeros. */
INLINE V load_end(const float *x, long size) { V v = {0}; memcpy(&v, x, 4 * size); return v; }
INLINE void store_end(float *x, V v, long size) { memcpy(x, &v, 4 * size); }
INLINE V fill_end(float x, long size) { V v = {0}; for (long lane = 0; lane < size; lane++) v[lane] = x; return v; }

/* The larger elements; NaN in y comes through, NaN in x is lost. */
INLINE V larger(V x, V y) {
#if LANES == 16
    return _mm512_max_ps(x, y);
#elif LANES == 8
    return _mm256_max_ps(x, y);
#else
    I above = x > y;
    return (V)(((I)x & above) | ((I)y & ~above));
#endif
}

INLINE V smaller(V x, V y) {
#if LANES == 16
    return _mm512_min_ps(x, y);
#elif LANES == 8
    return _mm256_min_ps(x, y);
#else
    I below = x < y;
    return (V)(((I)x & below) | ((I)y & ~below));
#endif
}

INLINE V root(V x) {
#if LANES == 16
    return _mm512_sqrt_ps(x);
#elif LANES == 8
    return _mm256_sqrt_ps(x);
#else
    for (int lane = 0; lane < LANES; lane++) x[lane] = sqrtf(x[lane]);
    return x;
#endif
}

/* x where `limit` <= y or y is NaN, otherwise 0. */
INLINE V zero_below(V x, V y, V limit) {
#if LANES == 16
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(y, limit, _CMP_LT_OQ), _mm512_setzero_ps());
#else
    return (V)((I)x & ~(I)(y < limit));
#endif
}

/* exp(x); 0 below -87, where float32 is about to become denormal, and exp(88) from 88 on.
   Source: Cephes (Moshier 1989, expf.c). */
INLINE V exponential(V x) {
    const V low = fill(-87.0f), high = fill(88.0f), rounding = fill(12582912.0f);
    V within = smaller(high, larger(low, x));
    V shifted = within * 1.44269504088896341f + rounding; /* its last bits hold the exponent of 2 */
    V power = shifted - rounding;
    V r = within - power * 0.693359375f;
    r = r + power * 2.12194440e-4f;
    V p = fill(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    V result = (V)((I)p + (I)((U)(I)shifted << 23));
    return zero_below(result, x, low);
}

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (FourI){__VA_ARGS__})
#endif

INLINE void transpose_four(const Four *x, Four *y) {
    Four a = PICK(x[0], x[1], 0, 4, 1, 5), b = PICK(x[0], x[1], 2, 6, 3, 7);
    Four c = PICK(x[2], x[3], 0, 4, 1, 5), d = PICK(x[2], x[3], 2, 6, 3, 7);
    y[0] = PICK(a, c, 0, 1, 4, 5);
    y[1] = PICK(a, c, 2, 3, 6, 7);
    y[2] = PICK(b, d, 0, 1, 4, 5);
    y[3] = PICK(b, d, 2, 3, 6, 7);
}

INLINE float sum_lanes(V v) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += v[lane];
    return sum;
}

/* The softmax of each row of [rows, size]; `out` may be x. */
void softmax(const float *x, float *out, long rows, long size);

#endif
