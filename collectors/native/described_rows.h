/* Reads tensors in host memory that lie there as they did when they were described, without a call of Python for each. */

#define SHARED_FROM 32768 /* elements beyond which torch itself uses several threads; see host_statistics.py */

/* Returns the kind of array that a dtype of DLPack is, KINDS for one that is not read. */
static int kind_of(int64_t dtype) {
    enum { DL_FLOAT = 2, DL_BFLOAT = 4 };
    int64_t code = dtype >> 32, bits = dtype >> 16 & 0xffff;
    if (code == DL_BFLOAT)
        return bits == 16 ? BFLOAT16 : KINDS;
    return code != DL_FLOAT ? KINDS : bits == 32 ? FLOAT32 : bits == 16 ? FLOAT16 : bits == 64 ? FLOAT64 : KINDS;
}

/* Takes a tensor as an array, if it is as `*expected` says, which then points behind it. Returns 1, 0 or, with an error, -1. */
static int take_described(
    const dl_functions *dl, PyObject *x, const int64_t **expected, const int64_t *end, PyObject *is_negated, array *a) {
    const int64_t *said = *expected;
    PyObject *address = address_of_described(dl, x, expected, end, is_negated);
    if (address == NULL || address == Py_None) {
        Py_XDECREF(address);
        return address == NULL ? -1 : 0;
    }
    *a = (array){.x = PyLong_AsVoidPtr(address), .n = 1, .kind = kind_of(said[2]), .counts = NULL};
    Py_DECREF(address);
    for (int64_t i = 0; i < said[3]; i++)
        a->n *= said[4 + i];
    enum { HOST = 1 };
    return said[1] >> 32 == HOST && a->kind != KINDS && a->x != NULL && a->n > 0;
}

/* read_described(functions, tensors, description, is_negated, eps, rows, parallel, threads, counts, scale): whether all
 * tensors were as described, and their statistics written. */
static PyObject *read_described(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    const int64_t *expected = NULL, *end = NULL;
    if (count != 10)
        return PyErr_Format(PyExc_TypeError, "read_described: %zd arguments; allowed: 10", count);
    const dl_functions *dl = take_description(args, 4, &expected, &end);
    options with = {.eps = PyFloat_AsDouble(args[4]), .scale = PyFloat_AsDouble(args[9])};
    double *rows = PyLong_AsVoidPtr(args[5]);
    uint32_t *counts = PyLong_AsVoidPtr(args[8]);
    pool p = {(parallel_region *)PyLong_AsVoidPtr(args[6]), (unsigned)PyLong_AsUnsignedLong(args[7])};
    Py_ssize_t n = PyErr_Occurred() ? -1 : PySequence_Size(args[1]);
    array *arrays = n < 0 ? NULL : PyMem_Malloc((size_t)(n ? n : 1) * sizeof *arrays);
    if (arrays == NULL)
        return n < 0 ? NULL : PyErr_NoMemory();
    int found = dl != NULL && rows != NULL;
    for (Py_ssize_t i = 0; i < n && found == 1; i++) {
        PyObject *x = PySequence_GetItem(args[1], i);
        found = take_described(dl, x, &expected, end, args[3], arrays + i);
        Py_XDECREF(x);
        arrays[i].counts = counts == NULL ? NULL : counts + SLOTS * i;
    }
    if (found == 1 && expected == end)
        write_rows(p, arrays, n, with, rows);
    PyMem_Free(arrays);
    return found < 0 ? NULL : PyBool_FromLong(found && expected == end);
}
