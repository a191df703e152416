/* Statistics of arrays in host memory: min, max, mean, norm, nans, infs, zeros, and a fingerprint of the bits, in one
 * pass over each; in a second one only where something is not finite, or where squares of doubles leave the range.
 *
 * Each loop works on LANES independent accumulators, which the compiler turns into vectors, and sums in double. On x86-64 Linux the loops are compiled for
 * three instruction sets, and the one to use is chosen when the library is loaded.
 * The interpreter lock is kept: released, another thread could move the rows while they are written.
 * A row has COLUMNS doubles; what each means is written down in collectors/statistics.py.
 */
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define COLUMNS 8
#define COUNT_BLOCK (1 << 20) /* elements between two emptyings of the 32-bit counters */

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && (defined(__GNUC__) && !defined(__clang__))
#define FOR_EACH_INSTRUCTION_SET __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_INSTRUCTION_SET
#endif

#define CACHE_LINE 64
#define AHEAD 4096 /* bytes between what is read and what is asked for: a page; without, memory is read at half the speed */
#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

#define INLINE static inline

enum kind { FLOAT32, BFLOAT16, FLOAT16, FLOAT64, KINDS };

typedef struct {
    double low, high, sum, squares;
    int64_t nans, infs, zeros;
    uint64_t bits_xor, bits_sum;
} totals;

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

/* One element into lane j. Where `careful`, NaN and Inf are counted and kept out of the rest; else they would show in
 * `squares`. Everything is written as a choice of values, never as a branch. */
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

/* One pass over n elements. The counters have an element's width, so that they are emptied before they overflow. */
#define DEFINE_PASS(name, stored, real, counter, word, LOAD, BITS, MAGNITUDE, careful, LARGEST, INFINITE) \
    FOR_EACH_INSTRUCTION_SET                                                                    \
    static void name(const stored *x, int64_t n, real eps, totals *t) {                         \
        real low[LANES], high[LANES];                                                           \
        double sum[LANES], squares[LANES];                                                      \
        counter zeros[LANES], nans[LANES], bad[LANES];                                          \
        word bits_xor[LANES], bits_sum[LANES];                                                  \
        for (int j = 0; j < LANES; j++) {                                                       \
            low[j] = INFINITE, high[j] = -INFINITE, sum[j] = squares[j] = 0;                    \
            zeros[j] = nans[j] = bad[j] = 0, bits_xor[j] = bits_sum[j] = 0;                     \
        }                                                                                       \
        memset(t, 0, sizeof *t);                                                                \
        int64_t i = 0, whole = n / LANES * LANES;                                               \
        do {                                                                                    \
            int64_t end = whole - i < COUNT_BLOCK ? whole : i + COUNT_BLOCK;                    \
            for (; i < end; i += LANES) {                                                       \
                for (size_t b = 0; b < LANES * sizeof *x; b += CACHE_LINE)                      \
                    PREFETCH((const char *)(x + i) + b + AHEAD);                                \
                for (int j = 0; j < LANES; j++)                                                 \
                    TAKE(j, LOAD(x[i + j]), BITS(x[i + j]), real, MAGNITUDE, careful, LARGEST, INFINITE);       \
            }                                                                                   \
            for (; end == whole && i < n; i++)                                                  \
                TAKE(0, LOAD(x[i]), BITS(x[i]), real, MAGNITUDE, careful, LARGEST, INFINITE);               \
            for (int j = 0; j < LANES; j++) {                                                   \
                t->zeros += zeros[j], t->nans += nans[j], t->infs += bad[j] - nans[j];          \
                zeros[j] = nans[j] = bad[j] = 0;                                                \
            }                                                                                   \
        } while (i < n);                                                                        \
        t->low = low[0], t->high = high[0];                                                     \
        for (int j = 0; j < LANES; j++) {                                                       \
            t->low = low[j] < t->low ? low[j] : t->low;                                         \
            t->high = high[j] > t->high ? high[j] : t->high;                                    \
            t->sum += sum[j], t->squares += squares[j];                                         \
            t->bits_xor ^= bits_xor[j], t->bits_sum += bits_sum[j];                             \
        }                                                                                       \
    }

#define DEFINE_PASSES(name, stored, real, counter, word, MAGNITUDE, LARGEST, INFINITE)                                        \
    DEFINE_PASS(quick_##name, stored, real, counter, word, load_##name, bits_##name, MAGNITUDE, 0, LARGEST, INFINITE)                      \
    DEFINE_PASS(careful_##name, stored, real, counter, word, load_##name, bits_##name, MAGNITUDE, 1, LARGEST, INFINITE)                    \
    static void read_##name(const void *x, int64_t n, double eps, totals *t) {                                          \
        quick_##name(x, n, (real)eps, t);                                                                               \
        if (!(t->squares <= DBL_MAX))                                                                                   \
            careful_##name(x, n, (real)eps, t);                                                                         \
    }

DEFINE_PASSES(float32, float, float, int32_t, uint32_t, fabsf, FLT_MAX, HUGE_VALF)
DEFINE_PASSES(bfloat16, uint16_t, float, int32_t, uint32_t, fabsf, FLT_MAX, HUGE_VALF)
DEFINE_PASSES(float16, uint16_t, float, int32_t, uint32_t, fabsf, FLT_MAX, HUGE_VALF)
DEFINE_PASSES(float64, double, double, int64_t, uint64_t, fabs, DBL_MAX, HUGE_VAL)

/* The second pass over doubles whose squares or sum left the range: everything is divided by the largest magnitude. */
static void rescale(const double *x, int64_t n, double largest, totals *t) {
    t->sum = t->squares = 0;
    for (int64_t i = 0; i < n; i++) {
        double scaled = fabs(x[i]) <= DBL_MAX ? x[i] / largest : 0;
        t->sum += scaled;
        t->squares += scaled * scaled;
    }
}

/* Largest float that is not above eps, so that comparing floats decides as comparing doubles would. */
static float float_below(double eps) {
    float rounded = (float)eps;
    return rounded > eps ? nextafterf(rounded, -HUGE_VALF) : rounded;
}

/* Both words folded to 53 bits, which a double holds exactly. The sum is taken modulo the word that it was made in. */
static double fingerprint(const totals *t, int kind) {
    uint64_t sum = kind == FLOAT64 ? t->bits_sum : (uint32_t)t->bits_sum;
    uint64_t mixed = (t->bits_xor * 0x9e3779b97f4a7c15u) ^ (sum * 0xc2b2ae3d27d4eb4fu + 0x165667b19e3779f9u);
    mixed ^= mixed >> 29;
    return (double)(mixed >> 11);
}

static void write_row(const void *x, int64_t n, int kind, double eps, double *row) {
    totals t;
    double scale = 1;
    switch (kind) {
    case FLOAT32: read_float32(x, n, float_below(eps), &t); break;
    case BFLOAT16: read_bfloat16(x, n, float_below(eps), &t); break;
    case FLOAT16: read_float16(x, n, float_below(eps), &t); break;
    default: read_float64(x, n, eps, &t);
    }
    int64_t finite = n - t.nans - t.infs;
    double largest = finite ? fmax(fabs(t.low), fabs(t.high)) : 0;
    if (kind == FLOAT64 && largest > 0 && !(t.squares < 1e290 && t.squares > 1e-260 && fabs(t.sum) <= DBL_MAX)) {
        rescale(x, n, largest, &t);
        scale = largest;
    }
    row[0] = finite ? t.low : NAN;
    row[1] = finite ? t.high : NAN;
    row[2] = finite ? t.sum / (double)finite * scale : NAN;
    row[3] = sqrt(t.squares) * scale;
    row[4] = (double)t.nans;
    row[5] = (double)t.infs;
    row[6] = n ? (double)t.zeros / (double)n : NAN;
    row[7] = fingerprint(&t, kind);
}

static PyObject *read_one(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5)
        return PyErr_Format(PyExc_TypeError, "read: %zd arguments; allowed: 5", count);
    const void *x = PyLong_AsVoidPtr(args[0]);
    int64_t n = PyLong_AsLongLong(args[1]);
    long kind = PyLong_AsLong(args[2]);
    double eps = PyFloat_AsDouble(args[3]);
    double *row = PyLong_AsVoidPtr(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (kind < 0 || kind >= KINDS || n < 0 || row == NULL || (x == NULL && n > 0))
        return PyErr_Format(PyExc_ValueError, "read: kind %ld, size %lld, or an address of 0", kind, (long long)n);
    write_row(x, n, (int)kind, eps, row);
    Py_RETURN_NONE;
}

typedef struct {
    const void *x;
    int64_t n;
    int kind;
} array;

static int take_arrays(PyObject *const *lists, Py_ssize_t count, array *arrays) {
    for (Py_ssize_t i = 0; i < count; i++) {
        array *a = arrays + i;
        a->x = PyLong_AsVoidPtr(PyList_GetItem(lists[0], i));
        a->n = PyLong_AsLongLong(PyList_GetItem(lists[1], i));
        long kind = PyLong_AsLong(PyList_GetItem(lists[2], i));
        if (PyErr_Occurred())
            return -1;
        if (kind < 0 || kind >= KINDS || a->n < 0 || (a->x == NULL && a->n > 0)) {
            PyErr_Format(PyExc_ValueError, "read_many: item %zd has kind %ld, size %lld", i, kind, (long long)a->n);
            return -1;
        }
        a->kind = (int)kind;
    }
    return 0;
}

static void write_rows(const array *arrays, Py_ssize_t count, double eps, double *rows) {
    for (Py_ssize_t i = 0; i < count; i++)
        write_row(arrays[i].x, arrays[i].n, arrays[i].kind, eps, rows + COLUMNS * i);
}

static PyObject *read_many(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5)
        return PyErr_Format(PyExc_TypeError, "read_many: %zd arguments; allowed: 5", count);
    for (int i = 0; i < 3; i++)
        if (!PyList_Check(args[i]) || PyList_Size(args[i]) != PyList_Size(args[0]))
            return PyErr_Format(PyExc_ValueError, "read_many: argument %d; allowed: lists of one length", i);
    Py_ssize_t n = PyList_Size(args[0]);
    double eps = PyFloat_AsDouble(args[3]);
    double *rows = PyLong_AsVoidPtr(args[4]);
    if (PyErr_Occurred())
        return NULL;
    array *arrays = PyMem_Malloc((size_t)(n ? n : 1) * sizeof *arrays);
    if (arrays == NULL)
        return PyErr_NoMemory();
    int failed = take_arrays(args, n, arrays);
    if (!failed)
        write_rows(arrays, n, eps, rows);
    PyMem_Free(arrays);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"read", (PyCFunction)(void (*)(void))read_one, METH_FASTCALL, "Write one array's statistics to a row."},
    {"read_many", (PyCFunction)(void (*)(void))read_many, METH_FASTCALL, "Write the statistics of many arrays."},
    {NULL, NULL, 0, NULL},
};

static int add_kinds(PyObject *module) {
    return PyModule_AddIntMacro(module, FLOAT32) | PyModule_AddIntMacro(module, BFLOAT16) |
           PyModule_AddIntMacro(module, FLOAT16) | PyModule_AddIntMacro(module, FLOAT64);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_kinds}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "host_rows", "Statistics of arrays in host memory, in one pass over each.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_host_rows(void) { return PyModuleDef_Init(&definition); }
