/* Attention of a block of queries with the keys that they see, forward and backward, in float32.

   A strip of queries goes through all keys of a head at a time: its scores stay in the cache. They are transposed,
   [keys, STRIP], with a query in each lane: the softmax needs no sums across lanes. Sums over keys, and over queries, go
   one after the other: keys that no query of a strip sees are left out, and change no bits.

   Source: Dao et al. 2022, FlashAttention, algorithms 1 and 4, with all keys of a strip as one block. */

#include <float.h>

#include "panels.h"

#define STRIP 64 /* queries, filled up with zeros */
#define KEYS 96 /* whose rows fit the first cache */

/* Sizes of a block, `groups` query heads for each of `heads` key/value heads, and the distances of the rows of its arrays
   in elements: `out_row` is also that of the gradient of the result. All queries see the first `visible` keys. */
typedef struct {
    long queries, keys, heads, groups, size, value_size, visible;
    long q_row, k_row, v_row, out_row, grad_q_row, grad_k_row, grad_v_row;
} BlockSizes;

typedef struct {
    long first, count;
} Keys;

static void multiply_panel(const float *a, long a_row, long a_step, const float *b, long b_row, float *c, long c_row,
                           long rows, long inner, int accumulate) {
    for (; rows >= TILE_ROWS; rows -= TILE_ROWS, a += TILE_ROWS * a_row, c += TILE_ROWS * c_row)
        multiply_tile(a, a_row, a_step, b, b_row, c, c_row, inner, accumulate, TILE_ROWS);
    multiply_last_rows(a, a_row, a_step, b, b_row, c, c_row, rows, inner, accumulate);
}

/* Each loop goes through some `rows` from `key` on. */
#define FOR_KEYS(key, rows, keys) \
    for (long key = 0, rows; rows = at_most((keys) - key, KEYS), key < (keys); key += KEYS)
#define FOR_PANELS(panel, width) for (long panel = 0; panel < (width); panel += PANEL)

/* out[keys, STRIP] = x[keys, size] y[size, STRIP] */
static void multiply_keys(const float *x, long x_row, const float *y, float *out, long keys, long size) {
    FOR_KEYS(key, rows, keys)
        FOR_PANELS(panel, STRIP)
            multiply_panel(x + key * x_row, x_row, 1, y + panel, STRIP, out + key * STRIP + panel, STRIP, rows, size, 0);
}

/* out[size, STRIP] = x[keys, size]^T y[keys, STRIP] */
static void sum_keys(const float *x, const float *y, float *out, long keys, long size) {
    FOR_KEYS(key, rows, keys)
        FOR_PANELS(panel, STRIP)
            multiply_panel(x + key * size, 1, size, y + key * STRIP + panel, STRIP, out + panel, STRIP, size, rows, key > 0);
}

/* out[keys, width] += x[keys, STRIP] y[STRIP, width] */
static void sum_queries(const float *x, const float *y, float *out, long keys, long width) {
    FOR_KEYS(key, rows, keys)
        FOR_PANELS(panel, width)
            multiply_panel(x + key * STRIP, STRIP, 1, y + panel, width, out + key * width + panel, width, rows, STRIP, 1);
}

static long padded(long size) { return (size + PANEL - 1) / PANEL * PANEL; }

/* out[columns, STRIP] = x[rows, columns]^T, with `filler` in the other columns of out. */
static void transpose(const float *x, long x_row, float *out, long rows, long columns, float filler) {
    for (long column = 0; column < columns; column++, x++, out += STRIP) {
        for (long row = 0; row < rows; row++) out[row] = x[row * x_row];
        for (long row = rows; row < STRIP; row++) out[row] = filler;
    }
}

/* out[rows, size] = x[columns, rows]^T, column by column times `factors`. */
static void transpose_back(const float *x, const float *factors, float *out, long out_row, long rows, long size) {
    for (long row = 0; row < rows; row++, out += out_row)
        for (long i = 0; i < size; i++) out[i] = x[i * STRIP + row] * factors[row];
}

static void copy_rows(const float *x, long x_row, float *out, long out_row, long rows, long size) {
    for (long row = 0; row < rows; row++) memcpy(out + row * out_row, x + row * x_row, 4 * size);
}

static void add_rows(const float *x, long x_row, float *out, long out_row, long rows, long size) {
    for (long row = 0; row < rows; row++, x += x_row, out += out_row)
        for (long i = 0; i < size; i++) out[i] += x[i];
}

static long strip_queries(const BlockSizes *n, long query) { return at_most(n->queries - query, STRIP); }

/* Transposes the terms that are added to scores of the other keys: [strips, keys, STRIP]. */
static float *transpose_bias(const BlockSizes *n, const float *bias, float *out) {
    long keys = n->keys - n->visible;
    for (long query = 0; query < n->queries; query += STRIP, out += keys * STRIP)
        transpose(bias + query * keys, keys, out, strip_queries(n, query), keys, -FLT_MAX);
    return out;
}

/* Whether a query of the strip sees the key with this row of biases. */
static int is_seen(const float *bias) {
    for (long query = 0; query < STRIP; query++)
        if (bias[query] >= 0) return 1;
    return 0;
}

/* Returns the keys of a strip without those at either end that none of its queries sees. Each query sees one. */
static Keys strip_keys(const BlockSizes *n, const float *bias) {
    long first = 0, end = n->keys;
    while (end > n->visible && !is_seen(bias + (end - 1 - n->visible) * STRIP)) end--;
    while (!n->visible && first < end && !is_seen(bias + first * STRIP)) first++;
    return (Keys){first, end - first};
}

/* Of the queries of a strip: their largest scores, and 1 / the sums of exp(score - largest). */
typedef struct {
    float largest[STRIP], inverse[STRIP];
} Softmax;

/* Replaces scores [keys, STRIP] by exp(score - the query's largest). A NaN makes the sum of its query one. */
static void exponentials(float *scores, long keys, Softmax *softmax) {
    for (long lane = 0; lane < STRIP; lane += PANEL) {
        float *column = scores + lane;
        V left = fill(-INFINITY), right = left;
        for (long key = 0; key < keys; key++) {
            left = larger(left, load(column + key * STRIP));
            right = larger(right, load(column + key * STRIP + LANES));
        }
        V left_sum = {0}, right_sum = {0};
        for (long key = 0; key < keys; key++) {
            float *place = column + key * STRIP;
            V one = exponential(load(place) - left), two = exponential(load(place + LANES) - right);
            left_sum += one;
            right_sum += two;
            store(place, one);
            store(place + LANES, two);
        }
        store(softmax->largest + lane, left);
        store(softmax->largest + lane + LANES, right);
        store(softmax->inverse + lane, 1.0f / left_sum);
        store(softmax->inverse + lane + LANES, 1.0f / right_sum);
    }
}

/* The exponentials of a strip's scores. `bias` is that of the strip. */
static void compute_scores(const BlockSizes *n, const float *q, const float *k, long k_row, const float *bias,
                           Keys keys, float *scores, Softmax *softmax) {
    multiply_keys(k + keys.first * k_row, k_row, q, scores, keys.count, n->size);
    long visible = n->visible > keys.first ? n->visible - keys.first : 0;
    const float *added = bias + (keys.first + visible - n->visible) * STRIP;
    for (long i = 0; i < (keys.count - visible) * STRIP; i += LANES)
        store(scores + visible * STRIP + i, load(scores + visible * STRIP + i) + load(added + i));
    exponentials(scores, keys.count, softmax);
}

/* Gradients of scores, p (grad - sum(p grad)) of each query; multiplies the exponentials p by `inverse` first. */
static void scores_gradient(float *p, float *grad, long keys, const float *inverse) {
    for (long lane = 0; lane < STRIP; lane += LANES) {
        V sum = {0}, factor = load(inverse + lane);
        for (long i = lane; i < keys * STRIP; i += STRIP) {
            V probability = load(p + i) * factor;
            store(p + i, probability);
            sum += probability * load(grad + i);
        }
        for (long i = lane; i < keys * STRIP; i += STRIP) store(grad + i, load(p + i) * (load(grad + i) - sum));
    }
}

/* softmax(q k^T + bias) v for all query heads of `heads` key/value heads. Out may be q if values are as wide.

   `largest`, the largest score of each query head, takes larger ones; it may be NULL. */
EXPORT void attention(const float *q, const float *k, const float *v, const float *bias, float *out, float *largest,
                      float *scratch, const BlockSizes *n) {
    float *biases = aligned(scratch), *scores = transpose_bias(n, bias, biases);
    float *values = scores + n->keys * STRIP, *columns = values + padded(n->keys * n->value_size);
    Softmax softmax;
    for (long head = 0; head < n->heads; head++, k += n->size, v += n->value_size) {
        copy_rows(v, n->v_row, values, n->value_size, n->keys, n->value_size);
        for (long group = 0; group < n->groups; group++, q += n->size, out += n->value_size) {
            const float *added = biases;
            for (long query = 0; query < n->queries; query += STRIP, added += (n->keys - n->visible) * STRIP) {
                long queries = strip_queries(n, query);
                Keys keys = strip_keys(n, added);
                transpose(q + query * n->q_row, n->q_row, columns, queries, n->size, 0);
                compute_scores(n, columns, k, n->k_row, added, keys, scores, &softmax);
                for (long row = 0; largest && row < queries; row++) {
                    float *most = largest + head * n->groups + group, sum = softmax.inverse[row];
                    if (sum != sum) *most = NAN;
                    if (softmax.largest[row] > *most) *most = softmax.largest[row];
                }
                sum_keys(values + keys.first * n->value_size, scores, columns, keys.count, n->value_size);
                transpose_back(columns, softmax.inverse, out + query * n->out_row, n->out_row, queries, n->value_size);
            }
        }
    }
}

/* Writes the gradient of q, and adds those of k and v; `grad` is that of the result. */
EXPORT void attention_gradient(const float *q, const float *k, const float *v, const float *bias, const float *grad,
                               float *grad_q, float *grad_k, float *grad_v, float *scratch, const BlockSizes *n) {
    long size = padded(n->size), value_size = padded(n->value_size);
    float *biases = aligned(scratch), *scores = transpose_bias(n, bias, biases), *score_grads = scores + n->keys * STRIP;
    float *sum_k = score_grads + n->keys * STRIP, *sum_v = sum_k + n->keys * size;
    float *q_rows = sum_v + n->keys * value_size, *grad_rows = q_rows + STRIP * size;
    float *q_columns = grad_rows + STRIP * value_size, *grad_columns = q_columns + STRIP * n->size;
    float *k_rows = grad_columns + STRIP * n->value_size;
    float ones[STRIP];
    Softmax softmax;
    for (long lane = 0; lane < STRIP; lane++) ones[lane] = 1;
    for (long head = 0; head < n->heads; head++) {
        memset(sum_k, 0, 4 * n->keys * (size + value_size));
        copy_rows(k, n->k_row, k_rows, n->size, n->keys, n->size);
        for (long group = 0; group < n->groups; group++) {
            const float *added = biases;
            for (long query = 0; query < n->queries; query += STRIP, added += (n->keys - n->visible) * STRIP) {
                long queries = strip_queries(n, query);
                Keys keys = strip_keys(n, added);
                memset(q_rows, 0, 4 * STRIP * (size + value_size));
                copy_rows(q + query * n->q_row, n->q_row, q_rows, size, queries, n->size);
                copy_rows(grad + query * n->out_row, n->out_row, grad_rows, value_size, queries, n->value_size);
                transpose(q_rows, size, q_columns, STRIP, n->size, 0);
                transpose(grad_rows, value_size, grad_columns, STRIP, n->value_size, 0);
                compute_scores(n, q_columns, k_rows, n->size, added, keys, scores, &softmax);
                multiply_keys(v + keys.first * n->v_row, n->v_row, grad_columns, score_grads, keys.count, n->value_size);
                scores_gradient(scores, score_grads, keys.count, softmax.inverse);
                sum_queries(scores, grad_rows, sum_v + keys.first * value_size, keys.count, value_size);
                sum_queries(score_grads, q_rows, sum_k + keys.first * size, keys.count, size);
                sum_keys(k_rows + keys.first * n->size, score_grads, q_columns, keys.count, n->size);
                transpose_back(q_columns, ones, grad_q + query * n->grad_q_row, n->grad_q_row, queries, n->size);
            }
            q += n->size;
            grad += n->value_size;
            grad_q += n->size;
        }
        add_rows(sum_k, size, grad_k, n->grad_k_row, n->keys, n->size);
        add_rows(sum_v, value_size, grad_v, n->grad_v_row, n->keys, n->value_size);
        k += n->size;
        v += n->value_size;
        grad_k += n->size;
        grad_v += n->value_size;
    }
}
