/* Products of float32 matrices for processors without AVX-512, where oneDNN's and OpenBLAS's are slower.

   A block of b, INNER rows of BLOCK columns, is packed in panels that fit the first cache, and multiplied by all rows of
   a. Weights are as a rule not in a cache: while one block is multiplied, the next one is fetched. That gains 3 to 6 %.
   Fetching the rows of out before their tile gains 1 to 5 %, but not where a is packed in tiles.
   Source: Goto and van de Geijn 2008, Anatomy of high-performance matrix multiplication, section 4. */

#include "panels.h"

#define INNER 256 /* of which a panel takes 16 KiB with AVX2 */
#define BLOCK (4 * PANEL)
#define PACKED_TOGETHER 16 /* rows of a transposed a: their cache lines stay in the cache until all are used */

/* Sizes of a product, and the distances of rows and of columns of a and b in elements: one of both is 1. */
typedef struct {
    long rows, columns, inner, a_row, a_column, b_row, b_column, out_row, accumulate;
} MatrixSizes;

/* What is left to fetch: `lines` cache lines of each of `rows` rows. */
typedef struct {
    const char *row;
    long step, rows, lines, line;
} Ahead;

INLINE void fetch(Ahead *ahead, long lines) {
    for (; lines && ahead->rows; lines--) {
        __builtin_prefetch(ahead->row + 64 * ahead->line);
        if (++ahead->line < ahead->lines) continue;
        ahead->line = 0;
        ahead->row += ahead->step;
        ahead->rows--;
    }
}

/* Of b, the block of `columns` columns and `inner` rows from (row, column). */
static Ahead block_ahead(const float *b, const MatrixSizes *n, long row, long column) {
    long inner = at_most(n->inner - row, INNER), columns = at_most(n->columns - column, BLOCK);
    const char *start = (const char *)(b + row * n->b_row + column * n->b_column);
    if (n->b_column == 1) return (Ahead){start, 4 * n->b_row, inner, (columns + 15) / 16, 0};
    return (Ahead){start, 4 * n->b_column, columns, (inner + 15) / 16, 0};
}

/* out[inner, PANEL] = b[columns, inner]^T; the last columns of out are 0. */
static void pack_transposed(const float *b, long step, float *out, long inner, long columns) {
    long column = 0;
    for (; column + 4 <= columns; column += 4, b += 4 * step) {
        long i = 0;
        for (; i + 4 <= inner; i += 4) {
            Four x[4], y[4];
            for (int k = 0; k < 4; k++) memcpy(&x[k], b + k * step + i, sizeof x[k]);
            transpose_four(x, y);
            for (int k = 0; k < 4; k++) memcpy(out + (i + k) * PANEL + column, &y[k], sizeof y[k]);
        }
        for (; i < inner; i++)
            for (int k = 0; k < 4; k++) out[i * PANEL + column + k] = b[k * step + i];
    }
    for (; column < PANEL; column++, b += step)
        for (long i = 0; i < inner; i++) out[i * PANEL + column] = column < columns ? b[i] : 0;
}

static void pack_rows(const float *b, long step, float *out, long inner, long columns) {
    for (long i = 0; i < inner; i++, b += step, out += PANEL) {
        if (columns == PANEL) memcpy(out, b, 4 * PANEL);
        else {
            memset(out, 0, 4 * PANEL);
            memcpy(out, b, 4 * columns);
        }
    }
}

/* Packs a^T in tiles [rows / TILE_ROWS, INNER, TILE_ROWS]. */
static void pack_tiles(const float *a, long step, float *out, long rows, long inner) {
    for (long first = 0; first < inner; first += PACKED_TOGETHER)
        for (long row = 0; row < rows; row += TILE_ROWS)
            for (long i = first; i < inner && i < first + PACKED_TOGETHER; i++)
                memcpy(out + row * INNER + i * TILE_ROWS, a + i * step + row, 4 * at_most(rows - row, TILE_ROWS));
}

/* A block of a as it is multiplied: the distances of rows, columns and tiles. */
typedef struct {
    const float *start;
    long row, column, tile;
} Rows;

static void multiply_rows(Rows a, const float *panel, float *out, long out_row, long rows, long inner, int accumulate,
                          Ahead *ahead, long lines) {
    for (; rows >= TILE_ROWS; rows -= TILE_ROWS, a.start += a.tile, out += TILE_ROWS * out_row) {
        fetch(ahead, lines);
        for (int row = 0; a.column == 1 && row < TILE_ROWS; row++)
            __builtin_prefetch(out + (TILE_ROWS + row) * out_row, 1); /* of the next tile */
        multiply_tile(a.start, a.row, a.column, panel, PANEL, out, out_row, inner, accumulate, TILE_ROWS);
    }
    multiply_last_rows(a.start, a.row, a.column, panel, PANEL, out, out_row, rows, inner, accumulate);
}

/* The same for the last panel, with fewer columns: tile by tile through memory of its own. */
static void multiply_last_columns(Rows a, const float *panel, float *out, long out_row, long rows, long columns,
                                  long inner, int accumulate, Ahead *ahead) {
    float tile[TILE_ROWS * PANEL] = {0};
    for (; rows > 0; rows -= TILE_ROWS, a.start += a.tile, out += TILE_ROWS * out_row) {
        long used = at_most(rows, TILE_ROWS);
        for (long row = 0; accumulate && row < used; row++)
            memcpy(tile + row * PANEL, out + row * out_row, 4 * columns);
        multiply_rows(a, panel, tile, PANEL, used, inner, accumulate, ahead, 0);
        for (long row = 0; row < used; row++) memcpy(out + row * out_row, tile + row * PANEL, 4 * columns);
    }
}

/* out = a b, or is added to. `scratch` has room for a block of b, and for INNER columns of a. */
EXPORT void product(const float *a, const float *b, float *out, float *scratch, const MatrixSizes *n) {
    float *panels = aligned(scratch), *tiles = panels + INNER * BLOCK;
    for (long i = 0; i < n->inner; i += INNER) {
        long inner = at_most(n->inner - i, INNER);
        int accumulate = n->accumulate || i;
        Rows rows = {a + i * n->a_column, n->a_row, n->a_column, TILE_ROWS * n->a_row};
        if (n->a_column != 1) {
            pack_tiles(rows.start, n->a_column, tiles, n->rows, inner);
            rows = (Rows){tiles, 1, TILE_ROWS, TILE_ROWS * INNER};
        }
        for (long column = 0; column < n->columns; column += BLOCK) {
            long columns = at_most(n->columns - column, BLOCK);
            const float *block = b + i * n->b_row + column * n->b_column;
            for (long panel = 0; panel < columns; panel += PANEL) {
                long used = at_most(columns - panel, PANEL);
                if (n->b_column == 1) pack_rows(block + panel, n->b_row, panels + panel * INNER, inner, used);
                else pack_transposed(block + panel * n->b_column, n->b_column, panels + panel * INNER, inner, used);
            }
            int ends = column + BLOCK >= n->columns;
            Ahead ahead = {0};
            if (!ends || i + INNER < n->inner) ahead = block_ahead(b, n, ends ? i + INNER : i, ends ? 0 : column + BLOCK);
            long lines = ahead.rows * ahead.lines * TILE_ROWS * PANEL / (n->rows * columns) + 1;
            for (long panel = 0; panel < columns; panel += PANEL) {
                float *to = out + column + panel;
                long used = at_most(columns - panel, PANEL);
                if (used == PANEL)
                    multiply_rows(rows, panels + panel * INNER, to, n->out_row, n->rows, inner, accumulate, &ahead, lines);
                else
                    multiply_last_columns(rows, panels + panel * INNER, to, n->out_row, n->rows, used, inner, accumulate, &ahead);
            }
        }
    }
}
