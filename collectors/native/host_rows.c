/* Computes statistics of arrays in host memory: min, max, mean, norm, nans, infs, zeros, and a fingerprint of the bits,
 * in one pass over each; a second pass runs only for non-finite values, or when squares of doubles overflow.
 *
 * Each loop works on LANES independent accumulators, which the compiler turns into vectors, and sums in double. On
 * x86-64 Linux the loops are compiled for three instruction sets, and the loader picks one of them. Arrays are always
 * cut into the same pieces, whose totals are added in order, so the result does not depend on the number of threads.
 * The interpreter lock stays held while rows are written: another thread could move them.
 * A row has COLUMNS doubles; collectors/statistics.py defines each. Where counters are given, each piece is also counted
 * for a histogram.
 */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifndef _WIN32
#include <unistd.h>
#endif
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#define LANES 16
#define COLUMNS 8
#define SHARED_FROM 32768 /* see host_rows.pyi */
#define PIECE (1 << 16) /* elements: some 15 us of work, far longer than handing it out; 32-bit counters hold it */

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && (defined(__GNUC__) && !defined(__clang__))
#define FOR_EACH_INSTRUCTION_SET __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_INSTRUCTION_SET
#endif

#define CACHE_LINE 64
#define AHEAD 4096 /* bytes that prefetching runs ahead of reading: a page; without it, reading takes twice as long */
#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

#define INLINE static inline

enum kind { FLOAT32, BFLOAT16, FLOAT16, FLOAT64, KINDS };
static const int WIDTHS[KINDS] = {4, 2, 2, 8};

typedef struct {
    double low, high, sum, squares;
    int64_t nans, infs, zeros;
    uint64_t bits_xor, bits_sum;
} totals;

static const totals nothing = {HUGE_VAL, -HUGE_VAL, 0, 0, 0, 0, 0, 0, 0};

INLINE void add_up(totals *t, const totals *more) {
    t->low = more->low < t->low ? more->low : t->low;
    t->high = more->high > t->high ? more->high : t->high;
    t->sum += more->sum, t->squares += more->squares;
    t->nans += more->nans, t->infs += more->infs, t->zeros += more->zeros;
    t->bits_xor ^= more->bits_xor, t->bits_sum += more->bits_sum;
}

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_float32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
INLINE uint64_t bits_float64(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
INLINE uint32_t bits_bfloat16(uint16_t x) { return x; }
INLINE uint32_t bits_float16(uint16_t x) { return x; }

INLINE float load_float32(float x) { return x; }
INLINE double load_float64(double x) { return x; }
INLINE float load_bfloat16(uint16_t x) { return from_bits((uint32_t)x << 16); }

/* A half's exponent is moved to a float's place and re-biased by a product, which also gives subnormals their value;
 * exponent 31 (Inf, NaN) becomes 255. */
INLINE float load_float16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, magnitude = (uint32_t)(x & 0x7fff) << 13, bits;
    uint32_t special = -(uint32_t)(magnitude >= 0x0f800000u) & 0x7f800000u;
    float value = from_bits(magnitude) * 0x1p112f;
    memcpy(&bits, &value, sizeof bits);
    return from_bits(sign | special | bits);
}

/* Adds one element to lane j. If `careful`, counts NaN and Inf and leaves them out of the rest; otherwise they show in
 * `squares`. Selects values and never branches. */
#define TAKE(j, value, bits, real, MAGNITUDE, careful, LARGEST, INFINITE)                  \
    do {                                                                                   \
        bits_xor[j] ^= (bits), bits_sum[j] += (bits);                                      \
        real v = (value), magnitude = MAGNITUDE(v);                                        \
        real below = !(careful) || magnitude <= LARGEST ? v : INFINITE;                    \
        real above = !(careful) || magnitude <= LARGEST ? v : -INFINITE;                   \
        double wide = !(careful) || magnitude <= LARGEST ? v : 0;                          \
        low[j] = below < low[j] ? below : low[j];                                          \
        high[j] = above > high[j] ? above : high[j];                                       \
        sum[j] += wide;                                                                    \
        squares[j] += wide * wide;                                                         \
        zeros[j] += magnitude <= eps;                                                      \
        nans[j] += (careful) && v != v;                                                    \
        bad[j] += (careful) && !(magnitude <= LARGEST);                                    \
    } while (0)

/* Defines one pass over a piece. Counters are as wide as elements, so that they fill the same vectors. */
#define DEFINE_PASS(name, stored, real, counter, word, LOAD, BITS, MAGNITUDE, careful, LARGEST, INFINITE) \
    FOR_EACH_INSTRUCTION_SET                                                                              \
    static void name(const stored *x, int64_t n, real eps, totals *t) {                                   \
        real low[LANES], high[LANES];                                                                     \
        double sum[LANES], squares[LANES];                                                                \
        counter zeros[LANES], nans[LANES], bad[LANES];                                                    \
        word bits_xor[LANES], bits_sum[LANES];                                                            \
        for (int j = 0; j < LANES; j++) {                                                                 \
            low[j] = INFINITE, high[j] = -INFINITE, sum[j] = squares[j] = 0;                              \
            zeros[j] = nans[j] = bad[j] = 0, bits_xor[j] = bits_sum[j] = 0;                               \
        }                                                                                                 \
        int64_t i = 0, whole = n / LANES * LANES;                                                         \
        for (; i < whole; i += LANES) {                                                                   \
            for (size_t b = 0; b < LANES * sizeof *x; b += CACHE_LINE)                                    \
                PREFETCH((const char *)(x + i) + b + AHEAD);                                              \
            for (int j = 0; j < LANES; j++)                                                               \
                TAKE(j, LOAD(x[i + j]), BITS(x[i + j]), real, MAGNITUDE, careful, LARGEST, INFINITE);     \
        }                                                                                                 \
        for (; i < n; i++)                                                                                \
            TAKE(0, LOAD(x[i]), BITS(x[i]), real, MAGNITUDE, careful, LARGEST, INFINITE);                 \
        *t = nothing;                                                                                     \
        for (int j = 0; j < LANES; j++)                                                                   \
            add_up(t, &(totals){low[j], high[j], sum[j], squares[j], nans[j], bad[j] - nans[j], zeros[j], \
                                bits_xor[j], bits_sum[j]});                                               \
    }

#define DEFINE_PASSES(name, stored, real, counter, word, MAGNITUDE, LARGEST, INFINITE)                              \
    DEFINE_PASS(quick_##name, stored, real, counter, word, load_##name, bits_##name, MAGNITUDE, 0, LARGEST, INFINITE)   \
    DEFINE_PASS(careful_##name, stored, real, counter, word, load_##name, bits_##name, MAGNITUDE, 1, LARGEST, INFINITE) \
    static void read_##name(const stored *x, int64_t n, real eps, totals *t) {                                          \
        quick_##name(x, n, eps, t);                                                                                     \
        if (!(t->squares <= DBL_MAX))                                                                                   \
            careful_##name(x, n, eps, t);                                                                               \
    }

DEFINE_PASSES(float32, float, float, int32_t, uint32_t, fabsf, FLT_MAX, HUGE_VALF)
DEFINE_PASSES(bfloat16, uint16_t, float, int32_t, uint32_t, fabsf, FLT_MAX, HUGE_VALF)
DEFINE_PASSES(float16, uint16_t, float, int32_t, uint32_t, fabsf, FLT_MAX, HUGE_VALF)
DEFINE_PASSES(float64, double, double, int64_t, uint64_t, fabs, DBL_MAX, HUGE_VAL)

/* Second pass over doubles whose squares or sum overflowed: divides each by the largest magnitude. */
static void rescale(const double *x, int64_t n, double largest, totals *t) {
    t->sum = t->squares = 0;
    for (int64_t i = 0; i < n; i++) {
        double scaled = fabs(x[i]) <= DBL_MAX ? x[i] / largest : 0;
        t->sum += scaled;
        t->squares += scaled * scaled;
    }
}

/* Returns the largest float not above eps, so that comparing floats gives the same result as comparing doubles. */
static float float_below(double eps) {
    float rounded = (float)eps;
    return rounded > eps ? nextafterf(rounded, -HUGE_VALF) : rounded;
}

/* Folds both words to 53 bits, which a double holds exactly. The sum is taken modulo the word size it was made in. */
static double fingerprint(const totals *t, int kind) {
    uint64_t sum = kind == FLOAT64 ? t->bits_sum : (uint32_t)t->bits_sum;
    uint64_t mixed = (t->bits_xor * 0x9e3779b97f4a7c15u) ^ (sum * 0xc2b2ae3d27d4eb4fu + 0x165667b19e3779f9u);
    mixed ^= mixed >> 29;
    return (double)(mixed >> 11);
}

/* A thread may be set to flush subnormal numbers to zero (`torch.set_flush_denormal` sets the calling thread). The
 * mode is switched off while a thread reads, so that the statistics do not depend on it. */
#if defined(__SSE2__)
typedef unsigned mode;
#define FLUSHES 0x8040u /* flush to zero, denormals are zeros */
INLINE mode take_subnormals(void) {
    mode before = _mm_getcsr();
    _mm_setcsr(before & ~FLUSHES);
    return before;
}
INLINE void restore_mode(mode before) { _mm_setcsr(before); }
#elif defined(__aarch64__) && defined(__GNUC__)
typedef uint64_t mode;
#define FLUSHES ((uint64_t)1 << 24)
INLINE mode take_subnormals(void) {
    mode before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before & ~FLUSHES));
    return before;
}
INLINE void restore_mode(mode before) { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
#else
typedef int mode;
INLINE mode take_subnormals(void) { return 0; }
INLINE void restore_mode(mode before) { (void)before; }
#endif

#include "histogram.h"

typedef struct {
    const void *x;
    int64_t n;
    int kind;
    uint32_t *counts; /* SLOTS counters, or NULL */
} array;

typedef struct {
    double eps, scale; /* histograms are of the values times scale */
} options;

static void read_piece(const array *a, int64_t first, options with, totals *t) {
    double eps = with.eps;
    int64_t n = a->n - first < PIECE ? a->n - first : PIECE;
    switch (a->kind) {
    case FLOAT32: read_float32((const float *)a->x + first, n, float_below(eps), t); break;
    case BFLOAT16: read_bfloat16((const uint16_t *)a->x + first, n, float_below(eps), t); break;
    case FLOAT16: read_float16((const uint16_t *)a->x + first, n, float_below(eps), t); break;
    default: read_float64((const double *)a->x + first, n, eps, t);
    }
    if (a->counts != NULL)
        count_values((const char *)a->x + first * WIDTHS[a->kind], n, a->kind, with.scale, a->counts);
}

static void write_row(const array *a, totals *t, double *row) {
    double scale = 1;
    int64_t finite = a->n - t->nans - t->infs;
    double largest = finite ? fmax(fabs(t->low), fabs(t->high)) : 0;
    if (a->kind == FLOAT64 && largest > 0 && !(t->squares < 1e290 && t->squares > 1e-260 && fabs(t->sum) <= DBL_MAX)) {
        rescale(a->x, a->n, largest, t);
        scale = largest;
    }
    row[0] = finite ? t->low : NAN;
    row[1] = finite ? t->high : NAN;
    row[2] = finite ? t->sum / (double)finite * scale : NAN;
    row[3] = sqrt(t->squares) * scale;
    row[4] = (double)t->nans;
    row[5] = (double)t->infs;
    row[6] = a->n ? (double)t->zeros / (double)a->n : NAN;
    row[7] = fingerprint(t, a->kind);
}

static void read_whole(const array *a, options with, double *row) {
    totals t = nothing, of_piece;
    for (int64_t first = 0; first < a->n; first += PIECE) {
        read_piece(a, first, with, &of_piece);
        add_up(&t, &of_piece);
    }
    write_row(a, &t, row);
}

/* ------------------------------------------------------------------ shared among threads
 *
 * torch's worker threads take the pieces one by one; no thread is created, and after an operation the workers often
 * still spin. Their OpenMP runtime is entered as compilers do it, by `GOMP_parallel`, whose address the caller gives,
 * with as many threads as torch uses: with another number the runtime would start or end some.
 */

typedef void parallel_region(void (*work)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    const array *of;
    int64_t first;
    totals t;
} piece;

typedef struct {
    piece *pieces;
    int64_t count, next;
    options with;
} job;

#if defined(__GNUC__) && !defined(_WIN32)
#define TAKE_NEXT(number) __atomic_fetch_add(number, 1, __ATOMIC_RELAXED)

static pid_t imported_by; /* a forked child has its parent's pool but not its threads, and would wait for them */

static int may_share(parallel_region *parallel) { return parallel != NULL && getpid() == imported_by; }
static void remember_process(void) { imported_by = getpid(); }

static void take_pieces(void *data) {
    job *j = data;
    mode before = take_subnormals();
    for (int64_t i; (i = TAKE_NEXT(&j->next)) < j->count;)
        read_piece(j->pieces[i].of, j->pieces[i].first, j->with, &j->pieces[i].t);
    restore_mode(before);
}
#else
#define TAKE_NEXT(number) ((*(number))++)

static int may_share(parallel_region *parallel) { return 0; }
static void remember_process(void) {}
static void take_pieces(void *data) {}
#endif

static int64_t count_pieces(const array *arrays, Py_ssize_t count) {
    int64_t pieces = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        pieces += (arrays[i].n + PIECE - 1) / PIECE;
    return pieces;
}

typedef struct {
    parallel_region *parallel;
    unsigned threads;
} pool;

static void read_in_pieces(pool p, const array *arrays, Py_ssize_t count, options with, double *rows, piece *pieces) {
    job all = {pieces, 0, 0, with};
    for (Py_ssize_t i = 0; i < count; i++)
        for (int64_t first = 0; first < arrays[i].n; first += PIECE)
            pieces[all.count].of = arrays + i, pieces[all.count++].first = first;
    p.parallel(take_pieces, &all, p.threads, 0);
    for (Py_ssize_t i = 0; i < count; i++) {
        totals t = nothing;
        for (; pieces < all.pieces + all.count && pieces->of == arrays + i; pieces++)
            add_up(&t, &pieces->t);
        write_row(arrays + i, &t, rows + COLUMNS * i);
    }
}

static void write_rows(pool p, const array *arrays, Py_ssize_t count, options with, double *rows) {
    int64_t count_of_pieces = count_pieces(arrays, count);
    mode before = take_subnormals();
    piece *pieces = NULL;
    if (p.threads > 1 && count_of_pieces > 1 && may_share(p.parallel))
        pieces = PyMem_Malloc((size_t)count_of_pieces * sizeof *pieces);
    if (pieces != NULL)
        read_in_pieces(p, arrays, count, with, rows, pieces);
    else
        for (Py_ssize_t i = 0; i < count; i++)
            read_whole(arrays + i, with, rows + COLUMNS * i);
    PyMem_Free(pieces);
    restore_mode(before);
}

#include "alignment.h"

/* ------------------------------------------------------------------ called from Python */

static int take_array(PyObject *address, PyObject *size, PyObject *kind, array *a) {
    a->x = PyLong_AsVoidPtr(address);
    a->n = PyLong_AsLongLong(size);
    long wanted = PyLong_AsLong(kind);
    if (PyErr_Occurred())
        return -1;
    if (wanted < 0 || wanted >= KINDS || a->n < 0 || (a->x == NULL && a->n > 0)) {
        PyErr_Format(PyExc_ValueError, "kind %ld, size %lld, or an address of 0", wanted, (long long)a->n);
        return -1;
    }
    a->kind = (int)wanted;
    a->counts = NULL;
    return 0;
}

/* Takes arrays given as lists of one length: addresses, sizes and kinds. Returns NULL, with the error set, if they are not. */
static array *take_arrays(const char *name, PyObject *addresses, PyObject *sizes, PyObject *kinds, Py_ssize_t n) {
    if (!PyList_Check(addresses) || !PyList_Check(sizes) || !PyList_Check(kinds) || PyList_Size(addresses) != n ||
        PyList_Size(sizes) != n || PyList_Size(kinds) != n)
        return (array *)PyErr_Format(PyExc_ValueError, "%s: allowed: lists of one length", name);
    array *arrays = PyMem_Malloc((size_t)(n ? n : 1) * sizeof *arrays);
    if (arrays == NULL)
        return (array *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++)
        if (take_array(PyList_GetItem(addresses, i), PyList_GetItem(sizes, i), PyList_GetItem(kinds, i), arrays + i)) {
            PyMem_Free(arrays);
            return NULL;
        }
    return arrays;
}

/* Takes the arguments that may be missing: the address of SLOTS counters for each array, and the scale. */
static uint32_t *take_counters(PyObject *const *args, Py_ssize_t count, options *with) {
    with->eps = PyFloat_AsDouble(args[3]);
    with->scale = count == 9 ? PyFloat_AsDouble(args[8]) : 1;
    return count == 9 ? PyLong_AsVoidPtr(args[7]) : NULL;
}

static PyObject *read_one(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 7 && count != 9)
        return PyErr_Format(PyExc_TypeError, "read: %zd arguments; allowed: 7 or 9", count);
    array a;
    options with;
    uint32_t *counts = take_counters(args, count, &with);
    double *row = PyLong_AsVoidPtr(args[4]);
    pool p = {(parallel_region *)PyLong_AsVoidPtr(args[5]), (unsigned)PyLong_AsUnsignedLong(args[6])};
    if (take_array(args[0], args[1], args[2], &a))
        return NULL;
    if (row == NULL)
        return PyErr_Format(PyExc_ValueError, "read: a row at address 0");
    a.counts = counts;
    write_rows(p, &a, 1, with, row);
    Py_RETURN_NONE;
}

static PyObject *read_many(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 7 && count != 9)
        return PyErr_Format(PyExc_TypeError, "read_many: %zd arguments; allowed: 7 or 9", count);
    Py_ssize_t n = PyList_Check(args[0]) ? PyList_Size(args[0]) : -1;
    options with;
    uint32_t *counts = take_counters(args, count, &with);
    double *rows = PyLong_AsVoidPtr(args[4]);
    pool p = {(parallel_region *)PyLong_AsVoidPtr(args[5]), (unsigned)PyLong_AsUnsignedLong(args[6])};
    if (PyErr_Occurred())
        return NULL;
    array *arrays = take_arrays("read_many", args[0], args[1], args[2], n);
    if (arrays == NULL)
        return NULL;
    for (Py_ssize_t i = 0; counts != NULL && i < n; i++)
        arrays[i].counts = counts + SLOTS * i;
    write_rows(p, arrays, n, with, rows);
    PyMem_Free(arrays);
    Py_RETURN_NONE;
}

static PyObject *align_many(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 8)
        return PyErr_Format(PyExc_TypeError, "align: %zd arguments; allowed: 8", count);
    double *rows = PyLong_AsVoidPtr(args[5]);
    pool p = {(parallel_region *)PyLong_AsVoidPtr(args[6]), (unsigned)PyLong_AsUnsignedLong(args[7])};
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t n = PyList_Check(args[4]) ? PyList_Size(args[4]) : -1;
    array *firsts = take_arrays("align", args[0], args[4], args[1], n);
    array *seconds = firsts != NULL ? take_arrays("align", args[2], args[4], args[3], n) : NULL;
    int failed = seconds == NULL || align(p, firsts, seconds, n, rows);
    PyMem_Free(firsts);
    PyMem_Free(seconds);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

#include "tensor_lists.h"
#include "described_rows.h"
#include "shared_tensors.h"

static PyMethodDef methods[] = {
    {"align", (PyCFunction)(void (*)(void))align_many, METH_FASTCALL, "Write the rows of many pairs of arrays."},
    {"read", (PyCFunction)(void (*)(void))read_one, METH_FASTCALL, "Write one array's statistics to a row."},
    {"read_many", (PyCFunction)(void (*)(void))read_many, METH_FASTCALL, "Write the statistics of many arrays."},
    {"describe", (PyCFunction)(void (*)(void))describe, METH_FASTCALL, "Describe how tensors lie in memory."},
    {"described_address", (PyCFunction)(void (*)(void))described_address, METH_FASTCALL,
     "Return the address of a tensor that is as described, else None."},
    {"described_addresses", (PyCFunction)(void (*)(void))described_addresses, METH_FASTCALL,
     "Return the addresses of tensors that are all as described, else None."},
    {"read_described", (PyCFunction)(void (*)(void))read_described, METH_FASTCALL,
     "Write the statistics of tensors that are all as described."},
    {"share", (PyCFunction)(void (*)(void))share, METH_FASTCALL, "Note a tensor that several series may share."},
    {"are_intact", (PyCFunction)(void (*)(void))are_intact, METH_FASTCALL, "Tell which tensors have not changed."},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module) {
    remember_process();
    number_slots();
    return intern_names() | PyModule_AddIntMacro(module, SHARED_FROM) | PyModule_AddIntMacro(module, FLOAT32) | PyModule_AddIntMacro(module, BFLOAT16) |
           PyModule_AddIntMacro(module, FLOAT16) | PyModule_AddIntMacro(module, FLOAT64);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)start}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "host_rows", "Statistics of arrays in host memory, in one pass over each.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_host_rows(void) { return PyModuleDef_Init(&definition); }
