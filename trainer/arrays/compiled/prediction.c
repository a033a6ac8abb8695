/* What a prediction computes for few tokens: products with all weights, and attention over the cache.

   Both wait for memory, not for multiplications, and take some microseconds: a team of threads that wait at full speed
   for a moment shares them. A number does not depend on how many threads there are, or which of them computes it. */

#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "vectors.h"

#define MOST_MEMBERS 16
#define SPINS 10000 /* of a thread that waits for work, before it sleeps: some hundred microseconds */

/* Computes the items from `first` until before `end`. */
typedef void (*Work)(const void *arguments, long first, long end, int member);

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    atomic_flag taken;         /* one caller at a time has the team */
    int members;               /* threads that were started, and the caller */
    int threads;               /* of them, those that the open work may have */
    atomic_int sleeping, inside;
    atomic_long round;         /* of the work that is open, or 0 */
    long rounds;
    Work work;
    const void *arguments;
    long count, chunk;
    atomic_long next;
} team = {.mutex = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .taken = ATOMIC_FLAG_INIT};

INLINE void relax(void) {
#if LANES > 4
    _mm_pause();
#endif
}

static void take_items(int member) {
    for (;;) {
        long first = atomic_fetch_add(&team.next, team.chunk);
        if (first >= team.count) return;
        long end = first + team.chunk;
        team.work(team.arguments, first, end < team.count ? end : team.count, member);
    }
}

static void *member_main(void *number) {
    long seen = 0;
    for (;;) {
        long round = 0;
        for (long spins = 0; (round = atomic_load(&team.round)) == 0 || round == seen; spins++) {
            if (spins < SPINS) {
                relax();
                continue;
            }
            pthread_mutex_lock(&team.mutex);
            atomic_fetch_add(&team.sleeping, 1);
            while ((round = atomic_load(&team.round)) == 0 || round == seen) pthread_cond_wait(&team.wake, &team.mutex);
            atomic_fetch_sub(&team.sleeping, 1);
            pthread_mutex_unlock(&team.mutex);
            break;
        }
        seen = round;
        /* The caller closes the round, and then waits until nobody is inside: who sees it open here may compute. */
        atomic_fetch_add(&team.inside, 1);
        if (atomic_load(&team.round) == round && (intptr_t)number < team.threads) take_items((int)(intptr_t)number);
        atomic_fetch_sub(&team.inside, 1);
    }
    return NULL;
}

/* A forked process has none of the threads. */
static void forget_members(void) {
    team.members = 0;
    team.round = team.sleeping = team.inside = 0;
    atomic_flag_clear(&team.taken);
    pthread_mutex_init(&team.mutex, NULL);
    pthread_cond_init(&team.wake, NULL);
}

/* Starts threads that are missing; where the system has none left, there are fewer. */
static void start_members(int threads) {
    static int registered = 0;
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget_members);
    if (!team.members) team.members = 1;
    for (; registered && team.members < threads && team.members < MOST_MEMBERS; team.members++) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &attributes, member_main, (void *)(intptr_t)team.members);
        pthread_attr_destroy(&attributes);
        if (failed) return;
    }
}

/* Computes `count` items, `chunk` at a time, with up to `threads` threads. */
static void share(Work work, const void *arguments, long count, long chunk, int threads) {
    if (threads < 2 || count <= chunk || atomic_flag_test_and_set(&team.taken)) {
        if (count > 0) work(arguments, 0, count, 0);
        return;
    }
    start_members(threads);
    team.threads = threads;
    team.work = work;
    team.arguments = arguments;
    team.count = count;
    team.chunk = chunk;
    atomic_store(&team.next, 0);
    atomic_store(&team.round, ++team.rounds);
    if (atomic_load(&team.sleeping)) {
        pthread_mutex_lock(&team.mutex);
        pthread_cond_broadcast(&team.wake);
        pthread_mutex_unlock(&team.mutex);
    }
    take_items(0);
    atomic_store(&team.round, 0);
    for (long spins = 0; atomic_load(&team.inside); spins++) {
        if (spins < SPINS) relax();
        else sched_yield();
    }
    atomic_flag_clear(&team.taken);
}

/* The sums of four vectors. */
INLINE Four sum_four(V a, V b, V c, V d) {
    V all[4] = {a, b, c, d};
    Four part[4];
    for (int i = 0; i < 4; i++) {
        Four pieces[LANES / 4];
        memcpy(pieces, &all[i], sizeof all[i]);
        for (int width = LANES / 8; width; width /= 2)
            for (int piece = 0; piece < width; piece++) pieces[piece] += pieces[piece + width];
        part[i] = pieces[0];
    }
    Four columns[4];
    transpose_four(part, columns);
    return (columns[0] + columns[2]) + (columns[1] + columns[3]);
}

/* Sizes of `few_rows_product`, and the distances of rows in elements. */
typedef struct {
    long rows, inner, columns, x_row, weight_row, out_row, accumulate, threads;
} ProductSizes;

typedef struct {
    const float *x, *weight;
    float *out;
    ProductSizes n;
} Product;

/* Four rows of the weight with `rows` rows of x. All sums of this file go in the same order: lane by lane. */
INLINE void block(const float *x, const float *weight, float *out, const ProductSizes *n, int rows, int columns) {
    V sums[4][4] = {{{0}}};
    const float *w[4];
    for (int k = 0; k < 4; k++) w[k] = weight + (k < columns ? k : 0) * n->weight_row;
    long i = 0;
    for (; i + LANES <= n->inner; i += LANES) {
        V weights[4] = {load(w[0] + i), load(w[1] + i), load(w[2] + i), load(w[3] + i)};
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            V numbers = load(x + row * n->x_row + i);
            for (int k = 0; k < 4; k++) sums[row][k] += numbers * weights[k];
        }
    }
    if (i < n->inner) {
        long end = n->inner - i;
        V weights[4] = {load_end(w[0] + i, end), load_end(w[1] + i, end), load_end(w[2] + i, end),
                        load_end(w[3] + i, end)};
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            V numbers = load_end(x + row * n->x_row + i, end);
            for (int k = 0; k < 4; k++) sums[row][k] += numbers * weights[k];
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++) {
        Four four = sum_four(sums[row][0], sums[row][1], sums[row][2], sums[row][3]);
        float *place = out + row * n->out_row;
        Four before = {0};
        if (n->accumulate) memcpy(&before, place, columns * sizeof(float));
        four += before;
        memcpy(place, &four, columns * sizeof(float));
    }
}

#define ROWS (LANES == 16 ? 4 : 2) /* whose sums fit the registers */

static void multiply(const void *arguments, long first, long end, int member) {
    (void)member;
    const Product *p = arguments;
    const ProductSizes *n = &p->n;
    for (long column = 4 * first; column < 4 * end && column < n->columns; column += 4) {
        const float *weight = p->weight + column * n->weight_row;
        const float *x = p->x;
        float *out = p->out + column;
        int columns = n->columns - column < 4 ? (int)(n->columns - column) : 4;
        long row = 0;
        if (columns == 4) {
            for (; row + ROWS <= n->rows; row += ROWS, x += ROWS * n->x_row, out += ROWS * n->out_row)
                block(x, weight, out, n, ROWS, 4);
            for (; row < n->rows; row++, x += n->x_row, out += n->out_row) block(x, weight, out, n, 1, 4);
        }
        for (; row < n->rows; row++, x += n->x_row, out += n->out_row) block(x, weight, out, n, 1, columns);
    }
}

#define SHARED_NUMBERS 8192 /* of a weight that a thread takes at once */

/* out = x weight^T, or is added to, for few rows of x. Takes the places of the addresses, where NumPy has them. */
EXPORT void few_rows_product(const float **x, const float **weight, float **out, const ProductSizes **sizes) {
    Product product = {*x, *weight, *out, **sizes};
    long quads = (product.n.columns + 3) / 4;
    long chunk = SHARED_NUMBERS / (4 * product.n.inner) + 1;
    share(multiply, &product, quads, chunk, (int)product.n.threads);
}

/* Sizes of `attend`: of its arrays, and the distances of sequences, heads and positions, in elements. */
typedef struct {
    long sequences, heads, rows, cached, size, value_size;
    long key_sequence, key_head, key, value_sequence, value_head, value, mask_sequence, mask_row, threads;
} AttendSizes;

typedef struct {
    const float *q, *keys, *values, *mask, *sinks;
    float *scores, *out;
    AttendSizes n;
} Attention;

/* The sums of the values' columns, weighted by the scores: those of even and of odd positions apart. */
INLINE void weigh(const float *values, const float *scores, float *out, long cached, long step, int vectors) {
    V even[4] = {{0}}, odd[4] = {{0}};
    long i = 0;
    for (; i + 2 <= cached; i += 2, values += 2 * step) {
        for (int k = 0; k < vectors; k++) {
            even[k] += scores[i] * load(values + k * LANES);
            odd[k] += scores[i + 1] * load(values + step + k * LANES);
        }
    }
    for (int k = 0; k < vectors; k++) {
        if (i < cached) even[k] += scores[i] * load(values + k * LANES);
        store(out + k * LANES, even[k] + odd[k]);
    }
}

static void attend_row(const Attention *a, long row, float *scores) {
    const AttendSizes *n = &a->n;
    long sequence = row / (n->heads * n->rows), head = row / n->rows % n->heads;
    const float *q = a->q + row * n->size;
    const float *key = a->keys + sequence * n->key_sequence + head * n->key_head;
    const float *value = a->values + sequence * n->value_sequence + head * n->value_head;
    float *out = a->out + row * n->value_size;
    const ProductSizes product = {1, n->size, n->cached, n->size, n->key, n->cached, 0, 1};
    long i = 0;
    for (; i + 4 <= n->cached; i += 4) block(q, key + i * n->key, scores + i, &product, 1, 4);
    if (i < n->cached) block(q, key + i * n->key, scores + i, &product, 1, (int)(n->cached - i));
    if (a->mask) {
        const float *added = a->mask + sequence * n->mask_sequence + row % n->rows * n->mask_row;
        for (i = 0; i < n->cached; i++) scores[i] += added[i];
    }
    long all = n->cached;
    if (a->sinks) scores[all++] = a->sinks[row % (n->heads * n->rows)];
    softmax(scores, scores, 1, all);
    long j = 0;
    for (; j + 4 * LANES <= n->value_size; j += 4 * LANES) weigh(value + j, scores, out + j, n->cached, n->value, 4);
    for (; j + LANES <= n->value_size; j += LANES) weigh(value + j, scores, out + j, n->cached, n->value, 1);
    for (; j < n->value_size; j++) {
        float sum = 0;
        for (i = 0; i < n->cached; i++) sum += scores[i] * value[i * n->value + j];
        out[j] = sum;
    }
}

static void attend_rows(const void *arguments, long first, long end, int member) {
    const Attention *a = arguments;
    for (long row = first; row < end; row++) attend_row(a, row, a->scores + member * (a->n.cached + 1));
}

/* softmax(q k^T + mask) v for `rows` queries of each head and sequence; q and out are contiguous.

   `mask` and `sinks` [heads, rows] may be NULL: a sink is one more score, without a value. `scores` has room for the
   scores of a query, and one more, for each thread. */
EXPORT void attend(const float *q, const float *keys, const float *values, const float *mask, const float *sinks,
                   float *scores, float *out, const AttendSizes *sizes) {
    Attention attention = {q, keys, values, mask, sinks, scores, out, *sizes};
    long chunk = SHARED_NUMBERS / (sizes->cached * (sizes->size + sizes->value_size) + 1) + 1;
    share(attend_rows, &attention, sizes->sequences * sizes->heads * sizes->rows, chunk, (int)sizes->threads);
}
