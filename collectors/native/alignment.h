/* Compares two arrays of one length element by element, in one pass over both: the cosine of the angle between them, and
 * the share of elements whose signs agree. collectors/alignment.py defines both.
 *
 * Elements are widened where they must be, a block at a time, which stays in the first cache; sums are in double. Where a
 * sum is not finite, the cosine is NaN.
 */

#define BLOCK 1024

typedef struct {
    double dot, first, second; /* sums of products and of squares */
    int64_t agree;             /* elements of the same sign minus those of different signs */
} pair_totals;

INLINE void add_up_pairs(pair_totals *t, const pair_totals *more) {
    t->dot += more->dot, t->first += more->first, t->second += more->second;
    t->agree += more->agree;
}

/* Defines the sums over n pairs, n at most BLOCK. Signs are compared as numbers, so that NaN agrees with nothing. */
#define DEFINE_MULTIPLY(name, real, counter)                                                              \
    FOR_EACH_INSTRUCTION_SET                                                                              \
    static void multiply_##name(const real *a, const real *b, int64_t n, pair_totals *t) {                \
        double dot[LANES] = {0}, first[LANES] = {0}, second[LANES] = {0};                                 \
        counter agree[LANES] = {0};                                                                       \
        int64_t i = 0, whole = n / LANES * LANES;                                                         \
        for (; i < whole; i += LANES)                                                                     \
            for (int j = 0; j < LANES; j++) {                                                             \
                double x = a[i + j], y = b[i + j];                                                        \
                dot[j] += x * y, first[j] += x * x, second[j] += y * y;                                   \
                agree[j] += SAME_SIGN(a[i + j], b[i + j]) - SAME_SIGN(a[i + j], -b[i + j]);               \
            }                                                                                             \
        for (; i < n; i++) {                                                                              \
            double x = a[i], y = b[i];                                                                    \
            dot[0] += x * y, first[0] += x * x, second[0] += y * y;                                       \
            agree[0] += SAME_SIGN(a[i], b[i]) - SAME_SIGN(a[i], -b[i]);                                   \
        }                                                                                                 \
        for (int j = 0; j < LANES; j++)                                                                   \
            add_up_pairs(t, &(pair_totals){dot[j], first[j], second[j], agree[j]});                       \
    }

#define SAME_SIGN(x, y) ((((x) > 0) & ((y) > 0)) | (((x) < 0) & ((y) < 0)))

DEFINE_MULTIPLY(narrow, float, int32_t)
DEFINE_MULTIPLY(wide, double, int64_t)

#define DEFINE_WIDEN(name, stored, real)                                                                  \
    FOR_EACH_INSTRUCTION_SET                                                                              \
    static void name(const stored *x, int64_t n, real *to) {                                              \
        for (int64_t i = 0; i < n; i++)                                                                   \
            to[i] = LOAD(x[i]);                                                                           \
    }

#define LOAD load_bfloat16
DEFINE_WIDEN(narrow_bfloat16, uint16_t, float)
DEFINE_WIDEN(wide_bfloat16, uint16_t, double)
#undef LOAD
#define LOAD load_float16
DEFINE_WIDEN(narrow_float16, uint16_t, float)
DEFINE_WIDEN(wide_float16, uint16_t, double)
#undef LOAD
#define LOAD load_float32
DEFINE_WIDEN(wide_float32, float, double)
#undef LOAD

/* Returns elements as floats: where they lie, or copied to `to`. */
static const float *as_floats(const array *a, int64_t from, int64_t n, float *to) {
    if (a->kind == FLOAT32)
        return (const float *)a->x + from;
    if (a->kind == BFLOAT16)
        narrow_bfloat16((const uint16_t *)a->x + from, n, to);
    else
        narrow_float16((const uint16_t *)a->x + from, n, to);
    return to;
}

static const double *as_doubles(const array *a, int64_t from, int64_t n, double *to) {
    switch (a->kind) {
    case FLOAT32: wide_float32((const float *)a->x + from, n, to); return to;
    case BFLOAT16: wide_bfloat16((const uint16_t *)a->x + from, n, to); return to;
    case FLOAT16: wide_float16((const uint16_t *)a->x + from, n, to); return to;
    default: return (const double *)a->x + from;
    }
}

typedef struct {
    const array *first, *second;
    int64_t from;
    pair_totals t;
} pair_piece;

static void multiply_piece(pair_piece *p) {
    int wide = p->first->kind == FLOAT64 || p->second->kind == FLOAT64;
    int64_t end = p->first->n - p->from < PIECE ? p->first->n : p->from + PIECE;
    p->t = (pair_totals){0, 0, 0, 0};
    for (int64_t i = p->from; i < end; i += BLOCK) {
        double a[BLOCK], b[BLOCK];
        float c[BLOCK], d[BLOCK];
        int64_t n = end - i < BLOCK ? end - i : BLOCK;
        if (wide)
            multiply_wide(as_doubles(p->first, i, n, a), as_doubles(p->second, i, n, b), n, &p->t);
        else
            multiply_narrow(as_floats(p->first, i, n, c), as_floats(p->second, i, n, d), n, &p->t);
    }
}

typedef struct {
    pair_piece *pieces;
    int64_t count, next;
} pair_job;

static void multiply_pieces(void *data) {
    pair_job *j = data;
    mode before = take_subnormals();
    for (int64_t i; (i = TAKE_NEXT(&j->next)) < j->count;)
        multiply_piece(j->pieces + i);
    restore_mode(before);
}

/* A row of COLUMNS: the share as the statistics of a tensor of one element, and the cosine as its value. */
static void write_pair(const pair_totals *t, int64_t n, double *row) {
    double share = n ? ((double)t->agree / (double)n + 1) / 2 : NAN;
    double cosine = t->dot / (sqrt(t->first) * sqrt(t->second));
    row[0] = row[1] = row[2] = share;
    row[3] = n ? share : 0;
    row[4] = row[5] = 0;
    row[6] = n ? share == 0 : NAN;
    row[7] = fabs(cosine) <= DBL_MAX ? fmax(-1, fmin(1, cosine)) : NAN;
}

/* Writes the row of each of `count` pairs of arrays; returns -1, with Python's error set, where memory is short. */
static int align(pool p, const array *firsts, const array *seconds, Py_ssize_t count, double *rows) {
    int64_t of_all = count_pieces(firsts, count);
    pair_job all = {PyMem_Malloc((size_t)(of_all ? of_all : 1) * sizeof(pair_piece)), 0, 0};
    if (all.pieces == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        for (int64_t from = 0; from < firsts[i].n; from += PIECE)
            all.pieces[all.count++] = (pair_piece){firsts + i, seconds + i, from, {0, 0, 0, 0}};
    if (p.threads > 1 && of_all > 1 && may_share(p.parallel))
        p.parallel(multiply_pieces, &all, p.threads, 0);
    else
        multiply_pieces(&all);
    pair_piece *next = all.pieces;
    for (Py_ssize_t i = 0; i < count; i++) {
        pair_totals t = {0, 0, 0, 0};
        for (; next < all.pieces + all.count && next->first == firsts + i; next++)
            add_up_pairs(&t, &next->t);
        write_pair(&t, firsts[i].n, rows + COLUMNS * i);
    }
    PyMem_Free(all.pieces);
    return 0;
}
