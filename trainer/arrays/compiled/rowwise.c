/* Functions of rows of float32 elements, each in one pass through the cache where NumPy needs several.

   Each element goes through vectors of one width, the last ones of a row filled up: its result does not depend on its
   place in a row or a tile. Sums of a row are taken lane by lane. Without -ffast-math NaN and infinity come through.

   numpy_operators.py has the formulas. */

#include "vectors.h"

/* 1 / (1 + exp(-x)); 0 below -87. */
INLINE V sigmoid(V x) { return zero_below(1.0f / (1.0f + exponential(-x)), x, fill(-87.0f)); }

EXPORT void softmax(const float *x, float *out, long rows, long size) {
    for (long row = 0; row < rows; row++, x += size, out += size) {
        V most = fill(-INFINITY);
        long i = 0;
        for (; i + LANES <= size; i += LANES) most = larger(most, load(x + i));
        float largest = -INFINITY;
        for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
        for (long j = i; j < size; j++) largest = x[j] > largest ? x[j] : largest;
        V sums = {0}; /* a NaN makes the sum one, and then all results */
        for (i = 0; i + LANES <= size; i += LANES) {
            V e = exponential(load(x + i) - largest);
            sums += e;
            store(out + i, e);
        }
        float sum = sum_lanes(sums);
        if (i < size) {
            V e = exponential(load_end(x + i, size - i) - largest);
            store_end(out + i, e, size - i);
            for (int lane = 0; lane < size - i; lane++) sum += e[lane];
        }
        float inverse = 1.0f / sum;
        for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(out + i) * inverse);
        for (; i < size; i++) out[i] *= inverse;
    }
}

INLINE float dot(const float *x, const float *y, long size) {
    V sums = {0};
    long i = 0;
    for (; i + LANES <= size; i += LANES) sums += load(x + i) * load(y + i);
    if (i < size) sums += load_end(x + i, size - i) * load_end(y + i, size - i);
    return sum_lanes(sums);
}

EXPORT void softmax_gradient(const float *y, const float *grad, float *out, long rows, long size) {
    for (long row = 0; row < rows; row++, y += size, grad += size, out += size) {
        float sum = dot(y, grad, size);
        long i = 0;
        for (; i + LANES <= size; i += LANES) store(out + i, load(y + i) * (load(grad + i) - sum));
        for (; i < size; i++) out[i] = y[i] * (grad[i] - sum);
    }
}

static float mean_of(const float *x, long size) {
    V sums = {0};
    long i = 0;
    for (; i + LANES <= size; i += LANES) sums += load(x + i);
    if (i < size) sums += load_end(x + i, size - i);
    return sum_lanes(sums) / size;
}

/* 1 / sqrt(mean(x^2) + eps) of each row; `step` is the distance of rows. With `centers` x is taken without the mean of
   its row, in the two functions below as well. */
EXPORT void rms_scales(const float *x, float *scale, long rows, long size, long step, float eps, int centers) {
    for (long row = 0; row < rows; row++, x += step) {
        float mean = centers ? mean_of(x, size) : 0.0f;
        V sums = {0}, more = {0};
        long i = 0;
        for (; i + 2 * LANES <= size; i += 2 * LANES) {
            V one = load(x + i) - mean, two = load(x + i + LANES) - mean;
            sums += one * one;
            more += two * two;
        }
        for (; i < size; i += LANES) {
            V one = i + LANES <= size ? load(x + i) - mean : load_end(x + i, size - i) - fill_end(mean, size - i);
            sums += one * one;
        }
        scale[row] = 1.0f / sqrtf(sum_lanes(sums + more) / size + eps);
    }
}

EXPORT void rms_norm(const float *x, const float *weight, const float *scale, float *out, long rows, long size,
                     long step, long out_step, int centers) {
    for (long row = 0; row < rows; row++, x += step, out += out_step) {
        float mean = centers ? mean_of(x, size) : 0.0f;
        long i = 0;
        for (; i + LANES <= size; i += LANES) store(out + i, (load(x + i) - mean) * scale[row] * load(weight + i));
        for (; i < size; i++) out[i] = (x[i] - mean) * scale[row] * weight[i];
    }
}

/* Adds to the gradient of the weight; returns the terms of the sum that projects the gradient on x. */
INLINE V add_weight_gradient(const float *x, const float *weight, const float *grad, float *weight_grad, float scale,
                             float mean, long size) {
    V product = (load_end(x, size) - mean) * load_end(grad, size);
    store_end(weight_grad, load_end(weight_grad, size) + product * scale, size);
    return product * load_end(weight, size);
}

/* Replaces grad by the gradient of x, and adds up the gradient of the weight. */
EXPORT void rms_norm_gradient(const float *x, const float *weight, const float *scale, float *grad, float *weight_grad,
                              long rows, long size, long step, long grad_step, int centers) {
    for (long row = 0; row < rows; row++, x += step, grad += grad_step) {
        float s = scale[row], mean = centers ? mean_of(x, size) : 0.0f;
        V sums = {0};
        long i = 0;
        for (; i + LANES <= size; i += LANES)
            sums += add_weight_gradient(x + i, weight + i, grad + i, weight_grad + i, s, mean, LANES);
        if (i < size) sums += add_weight_gradient(x + i, weight + i, grad + i, weight_grad + i, s, mean, size - i);
        float projected = sum_lanes(sums) * (s * s * s / size);
        for (i = 0; i + LANES <= size; i += LANES)
            store(grad + i, load(grad + i) * load(weight + i) * s - (load(x + i) - mean) * projected);
        for (; i < size; i++) grad[i] = grad[i] * weight[i] * s - (x[i] - mean) * projected;
        if (!centers) continue;
        mean = mean_of(grad, size);
        for (i = 0; i + LANES <= size; i += LANES) store(grad + i, load(grad + i) - mean);
        for (; i < size; i++) grad[i] -= mean;
    }
}

/* Gated activations, by their kinds. That of GELU is x sigmoid(2 y) with y = sqrt(2 / pi) (x + 0.044715 x^3). */
enum { SILU, GELU, RELU2 };
#define GELU_ROOT 1.5957691216057308f
#define GELU_CUBE 0.044715f

INLINE V gate_of(V x, int kind) {
    if (kind == GELU) return x * sigmoid(GELU_ROOT * x * (1.0f + GELU_CUBE * x * x));
    if (kind == RELU2) {
        V positive = larger(fill(0.0f), x);
        return positive * positive;
    }
    return x * sigmoid(x);
}

/* The derivative of `gate_of`; writes the activation to `active`. */
INLINE V gate_slope(V x, V *active, int kind) {
    V s, inner;
    if (kind == RELU2) {
        V positive = larger(fill(0.0f), x);
        *active = positive * positive;
        return 2.0f * positive;
    }
    if (kind == GELU) {
        V square = GELU_CUBE * x * x;
        s = sigmoid(GELU_ROOT * x * (1.0f + square));
        inner = GELU_ROOT * x * (1.0f + 3.0f * square);
    } else {
        s = sigmoid(x);
        inner = x;
    }
    *active = x * s;
    return s * (1.0f + inner * (1.0f - s));
}

/* At most LANES elements; the compiler knows LANES itself as `size` of all but the last ones. */
INLINE void gated_lanes(const float *gate, const float *up, float *out, long size, int kind) {
    V active = gate_of(load_end(gate, size), kind);
    store_end(out, up ? active * load_end(up, size) : active, size);
}

INLINE void gated_kind(const float *gate, const float *up, float *out, long size, int kind) {
    long i = 0;
    for (; i + LANES <= size; i += LANES) gated_lanes(gate + i, up ? up + i : NULL, out + i, LANES, kind);
    if (i < size) gated_lanes(gate + i, up ? up + i : NULL, out + i, size - i, kind);
}

/* A function for each kind, which the compiler knows. */
#define FOR_KIND(function, kind, ...)                              \
    do {                                                           \
        if (kind == GELU) function(__VA_ARGS__, GELU);             \
        else if (kind == RELU2) function(__VA_ARGS__, RELU2);      \
        else function(__VA_ARGS__, SILU);                          \
    } while (0)

/* Writes activation(gate) * up, or activation(gate) if up is NULL. */
EXPORT void gated(const float *gate, const float *up, float *out, long size, int kind) {
    FOR_KIND(gated_kind, kind, gate, up, out, size);
}

INLINE void gated_gradient_lanes(float *gate, float *up, const float *grad, float *result, long size, int kind) {
    V active, g = load_end(grad, size);
    V slope = gate_slope(load_end(gate, size), &active, kind);
    if (up) {
        V u = load_end(up, size);
        if (result) store_end(result, active * u, size);
        store_end(gate, g * u * slope, size);
        store_end(up, g * active, size);
    } else {
        if (result) store_end(result, active, size);
        store_end(gate, g * slope, size);
    }
}

INLINE void gated_gradient_kind(float *gate, float *up, const float *grad, float *result, long size, int kind) {
    long i = 0;
    for (; i + LANES <= size; i += LANES)
        gated_gradient_lanes(gate + i, up ? up + i : NULL, grad + i, result ? result + i : NULL, LANES, kind);
    if (i == size) return;
    gated_gradient_lanes(gate + i, up ? up + i : NULL, grad + i, result ? result + i : NULL, size - i, kind);
}

/* Replaces gate and up by their gradients; `result` receives the product unless it is NULL. Up may be NULL, too. */
EXPORT void gated_gradient(float *gate, float *up, const float *grad, float *result, long size, int kind) {
    FOR_KIND(gated_gradient_kind, kind, gate, up, grad, result, size);
}

INLINE void scale(float *x, float factor, long size) {
    for (long i = 0; i < size; i++) x[i] *= factor;
}

/* The same for rows whose products are multiplied by `weight`; `weight_grad` receives the gradients of the weights. */
EXPORT void weighted_gated_gradient(float *gate, float *up, const float *grad, float *result, const float *weight,
                                    float *weight_grad, long rows, long size) {
    for (long row = 0; row < rows; row++, gate += size, up += size, grad += size, result += size) {
        gated_gradient_kind(gate, up, grad, result, size, SILU);
        weight_grad[row] = dot(result, grad, size);
        scale(result, weight[row], size);
        scale(gate, weight[row], size);
        scale(up, weight[row], size);
    }
}

/* Adds a matrix [rows, size] to each of `blocks` matrices x, whose rows are `step` elements apart. */
EXPORT void add_to_blocks(float *x, const float *added, long blocks, long rows, long size, long block_step, long step) {
    for (long block = 0; block < blocks; block++, x += block_step) {
        for (long row = 0; row < rows; row++) {
            float *to = x + row * step;
            const float *from = added + row * size;
            for (long i = 0; i < size; i++) to[i] += from[i];
        }
    }
}

/* Sums `chosen` rows of x, [., size], for each token, multiplied by the token's factors; without factors all are 1. */
EXPORT void sum_rows(const float *x, const int32_t *rows, const float *factors, float *out, long tokens, long chosen,
                     long size) {
    for (long token = 0; token < tokens; token++, rows += chosen, out += size) {
        long i = 0;
        for (; i + LANES <= size; i += LANES) {
            V sum = {0};
            for (long choice = 0; choice < chosen; choice++) {
                V row = load(x + rows[choice] * size + i);
                sum += factors ? factors[token * chosen + choice] * row : row;
            }
            store(out + i, sum);
        }
        for (; i < size; i++) {
            float sum = 0;
            for (long choice = 0; choice < chosen; choice++)
                sum += (factors ? factors[token * chosen + choice] : 1) * x[rows[choice] * size + i];
            out[i] = sum;
        }
    }
}

/* `next` is the distance of pairs, `apart` that of the elements of a pair. */
INLINE void rotate_pairs(float *x, const float *rotation, long rows, long heads, long pairs, long next, long apart,
                         long step, long head_step, long rotation_step) {
    for (long row = 0; row < rows; row++, x += step, rotation += rotation_step) {
        for (long head = 0; head < heads; head++) {
            float *first = x + head * head_step, *second = first + apart;
            for (long pair = 0; pair < pairs; pair++) {
                float cosine = rotation[2 * pair], sine = rotation[2 * pair + 1];
                float one = first[next * pair], two = second[next * pair];
                first[next * pair] = one * cosine - two * sine;
                second[next * pair] = one * sine + two * cosine;
            }
        }
    }
}

/* Rotates the pairs of each head by the rotations of its row. Pairs are neighbours, or with `halves` elements i and
   i + pairs. Steps are in elements. */
EXPORT void rotate(float *x, const float *rotation, long rows, long heads, long pairs, long step, long head_step,
                   long rotation_step, int halves) {
    if (halves) rotate_pairs(x, rotation, rows, heads, pairs, 1, pairs, step, head_step, rotation_step);
    else rotate_pairs(x, rotation, rows, heads, pairs, 2, 1, step, head_step, rotation_step);
}

typedef struct {
    float scale, rate, eps, new_first, beta2, new_second, keep;
} AdamW;

INLINE void adamw_lanes(float *weight, float *first, float *second, const float *gradient, long size, const AdamW *a) {
    V g = load_end(gradient, size) * a->scale, m = load_end(first, size);
    m += (g - m) * a->new_first;
    V v = load_end(second, size) * a->beta2 + g * g * a->new_second;
    store_end(weight, load_end(weight, size) * a->keep - m / (root(v) + a->eps) * a->rate, size);
    store_end(first, m, size);
    store_end(second, v, size);
}

/* Adds the gradient to both moments; then weight = keep weight - rate first / (sqrt(second) + eps). */
EXPORT void adamw(float *weight, float *first, float *second, const float *gradient, long size, const AdamW *a) {
    long i = 0;
    for (; i + LANES <= size; i += LANES) adamw_lanes(weight + i, first + i, second + i, gradient + i, LANES, a);
    if (i < size) adamw_lanes(weight + i, first + i, second + i, gradient + i, size - i, a);
}

/* Rounds to bfloat16, to nearest, ties to even; NaN stays NaN. */
INLINE void to_bfloat16_lanes(const float *x, uint16_t *out, long size) {
    V numbers = load_end(x, size);
    U bits = (U)numbers, undefined = (U)(numbers != numbers);
    U rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16;
    rounded = (undefined & ((bits >> 16) | 0x40)) | (~undefined & rounded);
    H narrow = __builtin_convertvector(rounded, H);
    memcpy(out, &narrow, 2 * size);
}

INLINE void to_bfloat16_row(const float *x, uint16_t *out, long size) {
    long i = 0;
    for (; i + LANES <= size; i += LANES) to_bfloat16_lanes(x + i, out + i, LANES);
    if (i < size) to_bfloat16_lanes(x + i, out + i, size - i);
}

INLINE void to_float32_row(const uint16_t *x, float *out, long size) {
    for (long i = 0; i < size; i++) {
        uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(out + i, &bits, 4);
    }
}

/* Both cast matrices [rows, size]; the steps are the distances of matrices and of rows. */
#define FOR_ROWS(cast_row)                                                              \
    for (long matrix = 0; matrix < matrices; matrix++, x += matrix_step, out += out_matrix_step) \
        for (long row = 0; row < rows; row++) cast_row(x + row * row_step, out + row * out_row_step, size)

EXPORT void to_bfloat16(const float *x, uint16_t *out, long matrices, long rows, long size, long matrix_step,
                        long row_step, long out_matrix_step, long out_row_step) {
    FOR_ROWS(to_bfloat16_row);
}

EXPORT void to_float32(const uint16_t *x, float *out, long matrices, long rows, long size, long matrix_step,
                       long row_step, long out_matrix_step, long out_row_step) {
    FOR_ROWS(to_float32_row);
}
