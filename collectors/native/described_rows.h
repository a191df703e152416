/* Reads tensors in host memory that lie there as they did when they were described, without a call of Python for each. */

/* Where the rows of tensors in host memory are written, and how they are read: the members of a list. */
enum { ADDRESS, CAPACITY, IS_WRITTEN, COUNTS, EPS, PARALLEL, THREADS, HOST_MEMBERS };

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

/* Returns how many threads share an array of n elements, 0 with an error. */
static unsigned threads_for(PyObject *host, int64_t n) {
    if (n <= SHARED_FROM)
        return 1;
    PyObject *found = PyObject_CallNoArgs(PyList_GetItem(host, THREADS));
    unsigned long threads = found == NULL ? 0 : PyLong_AsUnsignedLong(found);
    Py_XDECREF(found);
    return PyErr_Occurred() ? 0 : (unsigned)threads;
}

/* Writes the rows of arrays from a position on, if there is room: returns 1, 0 or, with an error, -1. Where the rows lie
 * is asked here and not before: while tensors are looked at, another thread may move them. */
static int write_at(PyObject *host, Py_ssize_t at, array *arrays, Py_ssize_t n, int64_t largest, int counted, double scale) {
    options with = {.eps = PyFloat_AsDouble(PyList_GetItem(host, EPS)), .scale = scale};
    pool p = {(parallel_region *)PyLong_AsVoidPtr(PyList_GetItem(host, PARALLEL)), threads_for(host, largest)};
    double *rows = PyLong_AsVoidPtr(PyList_GetItem(host, ADDRESS));
    uint32_t *counts = counted ? PyLong_AsVoidPtr(PyList_GetItem(host, COUNTS)) : NULL;
    Py_ssize_t capacity = PyLong_AsSsize_t(PyList_GetItem(host, CAPACITY));
    if (PyErr_Occurred())
        return -1;
    if (rows == NULL || at < 0 || at + n > capacity)
        return 0;
    for (Py_ssize_t i = 0; counts != NULL && i < n; i++)
        arrays[i].counts = counts + SLOTS * (at + i);
    write_rows(p, arrays, n, with, rows + COLUMNS * at);
    return PyList_SetItem(host, IS_WRITTEN, Py_NewRef(Py_True)) ? -1 : 1;
}

static int is_host(PyObject *host) { return PyList_Check(host) && PyList_Size(host) == HOST_MEMBERS; }

/* read_described(functions, tensors, description, is_negated, host, position, largest, counted, scale): whether all tensors
 * were as described, and their statistics written. */
static PyObject *read_described(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    const int64_t *expected = NULL, *end = NULL;
    if (count != 9 || !is_host(args[4]))
        return PyErr_Format(PyExc_TypeError, "read_described: needs 9 arguments, the fifth a list of %d", HOST_MEMBERS);
    const dl_functions *dl = take_description(args, 4, &expected, &end);
    Py_ssize_t at = PyLong_AsSsize_t(args[5]);
    int64_t largest = PyLong_AsLongLong(args[6]);
    int counted = PyObject_IsTrue(args[7]);
    double scale = PyFloat_AsDouble(args[8]);
    Py_ssize_t n = PyErr_Occurred() ? -1 : PySequence_Size(args[1]);
    array *arrays = n < 0 ? NULL : PyMem_Malloc((size_t)(n ? n : 1) * sizeof *arrays);
    if (arrays == NULL)
        return n < 0 ? NULL : PyErr_NoMemory();
    int found = dl != NULL;
    for (Py_ssize_t i = 0; i < n && found == 1; i++) {
        PyObject *x = PySequence_GetItem(args[1], i);
        found = take_described(dl, x, &expected, end, args[3], arrays + i);
        Py_XDECREF(x);
    }
    if (found == 1)
        found = expected == end ? write_at(args[4], at, arrays, n, largest, counted, scale) : 0;
    PyMem_Free(arrays);
    return found < 0 ? NULL : PyBool_FromLong(found);
}
