/* Counts the values of a piece of an array in the bins that collectors/histogram.py defines. The piece was read for its
 * row just before, so it comes out of the cache. Included by host_rows.c, whose `load_` functions it uses.
 */
#define SLOTS 512 /* counters of an array */
#define MIDDLE 255
#define OTHERS 511 /* NaN and Inf */

static uint16_t slot_of[1 << 11]; /* by the upper 11 bits of a float: sign, exponent, two bits of the fraction */

static void number_slots(void) {
    for (int upper = 0; upper < 1 << 11; upper++) {
        int key = upper & 1023, octave = key >> 2, number = 0;
        if (octave >= 127 + 30)
            number = MIDDLE;
        else if (octave >= 127 + 16)
            number = octave - (127 + 16) + 241;
        else if (octave >= 127 - 24)
            number = key - 4 * (127 - 24) + 81;
        else if (octave >= 127 - 104)
            number = octave - (127 - 104) + 1;
        slot_of[upper] = (uint16_t)(octave == 255 ? OTHERS : upper >> 10 ? MIDDLE - number : MIDDLE + number);
    }
}

#if defined(__GNUC__)
#define ADD_COUNT(at, n) ((void)__atomic_fetch_add(at, n, __ATOMIC_RELAXED)) /* other threads count other pieces */
#else
#define ADD_COUNT(at, n) ((void)(*(at) += (n)))
#endif

/* Doubles beyond float's range belong to the last bins. */
INLINE float narrow(double x) { return fabs(x) <= DBL_MAX ? (float)fmin(fmax(x, -FLT_MAX), FLT_MAX) : (float)x; }

INLINE float times_float(float x, double scale) {
    double product = x * scale;
    return fabsf(x) <= FLT_MAX ? narrow(product) : x;
}
INLINE float times_double(double x, double scale) { return narrow(x * scale); }

/* Neighbours are counted apart, because a counter that was just written is not read at once. */
#define DEFINE_COUNT(name, stored, TIMES)                                                         \
    static void count_##name(const stored *x, int64_t n, double scale, uint32_t *counts) {        \
        uint32_t apart[4][SLOTS];                                                                 \
        int64_t i = 0, whole = n / 4 * 4;                                                         \
        memset(apart, 0, sizeof apart);                                                           \
        for (; i < whole; i += 4)                                                                 \
            for (int j = 0; j < 4; j++)                                                           \
                apart[j][slot_of[bits_float32(TIMES(load_##name(x[i + j]), scale)) >> 21]]++;     \
        for (; i < n; i++)                                                                        \
            apart[0][slot_of[bits_float32(TIMES(load_##name(x[i]), scale)) >> 21]]++;             \
        for (int s = 0; s < SLOTS; s++) {                                                         \
            uint32_t found = apart[0][s] + apart[1][s] + apart[2][s] + apart[3][s];               \
            if (found)                                                                            \
                ADD_COUNT(counts + s, found);                                                     \
        }                                                                                         \
    }

#define AS_IT_IS(x, scale) ((void)(scale), (x))
DEFINE_COUNT(float32, float, AS_IT_IS)
DEFINE_COUNT(bfloat16, uint16_t, AS_IT_IS)
DEFINE_COUNT(float16, uint16_t, AS_IT_IS)
DEFINE_COUNT(float64, double, times_double)
#define load_scaled_float32 load_float32
#define load_scaled_bfloat16 load_bfloat16
#define load_scaled_float16 load_float16
DEFINE_COUNT(scaled_float32, float, times_float)
DEFINE_COUNT(scaled_bfloat16, uint16_t, times_float)
DEFINE_COUNT(scaled_float16, uint16_t, times_float)

/* Adds the histogram of n elements at x, times scale, to the counters. */
static void count_values(const void *x, int64_t n, int kind, double scale, uint32_t *counts) {
    switch (kind) {
    case FLOAT32: (scale == 1 ? count_float32 : count_scaled_float32)(x, n, scale, counts); break;
    case BFLOAT16: (scale == 1 ? count_bfloat16 : count_scaled_bfloat16)(x, n, scale, counts); break;
    case FLOAT16: (scale == 1 ? count_float16 : count_scaled_float16)(x, n, scale, counts); break;
    default: count_float64(x, n, scale, counts);
    }
}
