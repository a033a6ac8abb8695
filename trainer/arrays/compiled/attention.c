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
    long first, end;
} Keys;

/* The keys that queries of a strip see: those of each panel of queries, all, and those that all panels have in common.
   `lanes` are its queries, rounded up to panels. */
typedef struct {
    long lanes;
    Keys all, common, panels[STRIP / PANEL];
} Strip;

static void multiply_panel(const float *a, long a_row, long a_step, const float *b, long b_row, float *c, long c_row,
                           long rows, long inner, int accumulate) {
    for (; rows >= TILE_ROWS; rows -= TILE_ROWS, a += TILE_ROWS * a_row, c += TILE_ROWS * c_row)
        multiply_tile(a, a_row, a_step, b, b_row, c, c_row, inner, accumulate, TILE_ROWS);
    multiply_last_rows(a, a_row, a_step, b, b_row, c, c_row, rows, inner, accumulate);
}

#define FOR_KEYS(key, stop, keys) \
    for (long key = (keys).first, stop; stop = at_most(key + KEYS, (keys).end), key < (keys).end; key = stop)
#define FOR_PANELS(panel, width) for (long panel = 0; panel < (width); panel += PANEL)

/* Those of the keys of a panel that lie in a range. */
static Keys panel_keys(const Strip *strip, long panel, long first, long end) {
    Keys keys = strip->panels[panel / PANEL];
    if (first > keys.first) keys.first = first;
    keys.end = at_most(keys.end, end);
    if (keys.end < keys.first) keys.end = keys.first;
    return keys;
}

/* out[keys, STRIP] = x[keys, size] y[size, STRIP] */
static void multiply_keys(const Strip *strip, const float *x, long x_row, const float *y, float *out, long size) {
    FOR_KEYS(key, stop, strip->all)
        FOR_PANELS(panel, strip->lanes) {
            Keys own = panel_keys(strip, panel, key, stop);
            float *to = out + own.first * STRIP + panel;
            multiply_panel(x + own.first * x_row, x_row, 1, y + panel, STRIP, to, STRIP, own.end - own.first, size, 0);
        }
}

/* out[size, STRIP] = x[keys, size]^T y[keys, STRIP] */
static void sum_keys(const Strip *strip, const float *x, const float *y, float *out, long size) {
    FOR_KEYS(key, stop, strip->all)
        FOR_PANELS(panel, strip->lanes) {
            Keys own = panel_keys(strip, panel, key, stop);
            int continues = own.first > strip->panels[panel / PANEL].first;
            if (own.end > own.first)
                multiply_panel(x + own.first * size, 1, size, y + own.first * STRIP + panel, STRIP, out + panel, STRIP,
                               size, own.end - own.first, continues);
        }
}

/* out[keys, width] += x[keys, queries] y[queries, width] */
static void add_products(const float *x, const float *y, float *out, Keys keys, long queries, long width) {
    FOR_KEYS(key, stop, keys)
        FOR_PANELS(panel, width)
            multiply_panel(x + key * STRIP, STRIP, 1, y + panel, width, out + key * width + panel, width, stop - key,
                           queries, 1);
}

/* The same for all queries of a strip, which see different keys. */
static void sum_queries(const Strip *strip, const float *x, const float *y, float *out, long width) {
    add_products(x, y, out, strip->common, strip->lanes, width);
    FOR_PANELS(panel, strip->lanes) {
        const float *rows = y + panel * width;
        add_products(x + panel, rows, out, panel_keys(strip, panel, 0, strip->common.first), PANEL, width);
        add_products(x + panel, rows, out, panel_keys(strip, panel, strip->common.end, strip->all.end), PANEL, width);
    }
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

/* Whether a query of the panel sees the key with these biases. */
static int is_seen(const float *bias) {
    uint32_t signs = ~0u, bits[PANEL];
    memcpy(bits, bias, sizeof bits);
    for (long query = 0; query < PANEL; query++) signs &= bits[query];
    return !(signs >> 31);
}

/* Leaves out keys at either end that no query of a panel sees. Each query sees one. */
static Strip find_keys(const BlockSizes *n, const float *bias, long queries) {
    Strip strip = {padded(queries), {n->keys, 0}, {0, n->keys}, {{0}}};
    FOR_PANELS(panel, strip.lanes) {
        Keys keys = {0, n->keys};
        while (keys.end > n->visible && !is_seen(bias + (keys.end - 1 - n->visible) * STRIP + panel)) keys.end--;
        while (!n->visible && keys.first < keys.end && !is_seen(bias + keys.first * STRIP + panel)) keys.first++;
        strip.panels[panel / PANEL] = keys;
        strip.all = (Keys){at_most(strip.all.first, keys.first), strip.all.end > keys.end ? strip.all.end : keys.end};
        strip.common = panel_keys(&strip, panel, strip.common.first, strip.common.end);
    }
    return strip;
}

/* Of the queries of a strip: their largest scores, and 1 / the sums of exp(score - largest). */
typedef struct {
    float largest[STRIP], inverse[STRIP];
} Softmax;

/* Adds the biases of the strip to its scores [keys, STRIP], and replaces them by exp(score - the query's largest). A NaN
   makes the sum of its query one. */
static void exponentials(const BlockSizes *n, const Strip *strip, const float *bias, float *scores, Softmax *softmax) {
    FOR_PANELS(lane, strip->lanes) {
        Keys keys = strip->panels[lane / PANEL];
        float *column = scores + lane;
        V left = fill(-INFINITY), right = left;
        for (long key = keys.first; key < keys.end; key++) {
            float *place = column + key * STRIP;
            const float *added = bias + (key - n->visible) * STRIP + lane;
            if (key >= n->visible) {
                store(place, load(place) + load(added));
                store(place + LANES, load(place + LANES) + load(added + LANES));
            }
            left = larger(left, load(place));
            right = larger(right, load(place + LANES));
        }
        V left_sum = {0}, right_sum = {0};
        for (long key = keys.first; key < keys.end; key++) {
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

/* Gradients of scores, p (grad - sum(p grad)) of each query; multiplies the exponentials p by `inverse` first. */
static void scores_gradient(const Strip *strip, float *p, float *grad, const float *inverse) {
    for (long lane = 0; lane < strip->lanes; lane += LANES) {
        Keys keys = strip->panels[lane / PANEL];
        long first = keys.first * STRIP + lane, end = keys.end * STRIP;
        V sum = {0}, factor = load(inverse + lane);
        for (long i = first; i < end; i += STRIP) {
            V probability = load(p + i) * factor;
            store(p + i, probability);
            sum += probability * load(grad + i);
        }
        for (long i = first; i < end; i += STRIP) store(grad + i, load(p + i) * (load(grad + i) - sum));
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
                Strip strip = find_keys(n, added, queries);
                transpose(q + query * n->q_row, n->q_row, columns, queries, n->size, 0);
                multiply_keys(&strip, k, n->k_row, columns, scores, n->size);
                exponentials(n, &strip, added, scores, &softmax);
                for (long row = 0; largest && row < queries; row++) {
                    float *most = largest + head * n->groups + group, sum = softmax.inverse[row];
                    if (sum != sum) *most = NAN;
                    if (softmax.largest[row] > *most) *most = softmax.largest[row];
                }
                sum_keys(&strip, values, scores, columns, n->value_size);
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
    for (long head = 0; head < n->heads; head++, k += n->size, v += n->value_size) {
        memset(sum_k, 0, 4 * n->keys * (size + value_size));
        copy_rows(k, n->k_row, k_rows, n->size, n->keys, n->size);
        for (long group = 0; group < n->groups; group++, q += n->size, grad += n->value_size, grad_q += n->size) {
            const float *added = biases;
            for (long query = 0; query < n->queries; query += STRIP, added += (n->keys - n->visible) * STRIP) {
                long queries = strip_queries(n, query);
                Strip strip = find_keys(n, added, queries);
                memset(q_rows, 0, 4 * STRIP * (size + value_size));
                copy_rows(q + query * n->q_row, n->q_row, q_rows, size, queries, n->size);
                copy_rows(grad + query * n->out_row, n->out_row, grad_rows, value_size, queries, n->value_size);
                transpose(q_rows, size, q_columns, STRIP, n->size, 0);
                transpose(grad_rows, value_size, grad_columns, STRIP, n->value_size, 0);
                multiply_keys(&strip, k_rows, n->size, q_columns, scores, n->size);
                exponentials(n, &strip, added, scores, &softmax);
                multiply_keys(&strip, v, n->v_row, grad_columns, score_grads, n->value_size);
                scores_gradient(&strip, scores, score_grads, softmax.inverse);
                sum_queries(&strip, scores, grad_rows, sum_v, value_size);
                sum_queries(&strip, score_grads, q_rows, sum_k, size);
                sum_keys(&strip, k_rows, score_grads, q_columns, n->size);
                transpose_back(q_columns, ones, grad_q + query * n->grad_q_row, n->grad_q_row, queries, n->size);
            }
        }
        add_rows(sum_k, size, grad_k, n->grad_k_row, n->keys, n->size);
        add_rows(sum_v, value_size, grad_v, n->grad_v_row, n->keys, n->value_size);
        grad_k += n->size;
        grad_v += n->value_size;
    }
}
