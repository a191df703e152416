/* Reads the addresses of tensors, if each lies in memory as it did when it was described. A framework's methods take a
 * third of a microsecond for each tensor; by the C functions of DLPack (https://dmlc.github.io/dlpack/, 1.3) it takes an
 * eighth of one. The structures below are DLPack's.
 */

typedef struct {
    int32_t type, id;
} dl_device;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} dl_dtype;

typedef struct {
    void *data;
    dl_device device;
    int32_t dimensions;
    dl_dtype dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct {
    uint32_t major, minor;
    void *earlier;
    void *allocate, *own, *to_python;
    int (*borrow)(void *tensor, dl_tensor *out); /* not 0 with a Python error */
    void *current_stream;
} dl_functions;

static const dl_functions *functions_in(PyObject *capsule) {
    const dl_functions *functions = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (functions != NULL && (functions->major != 1 || functions->borrow == NULL)) {
        PyErr_Format(PyExc_ValueError, "DLPack %u.%u; allowed: 1", functions->major, functions->minor);
        return NULL;
    }
    return functions;
}

/* Whether the elements lie in memory one after another, in order. */
static int is_contiguous(const dl_tensor *t) {
    int64_t expected = 1;
    for (int i = 0; i < t->dimensions; i++)
        if (t->shape[i] == 0)
            return 1;
    for (int i = t->dimensions; i-- > 0; expected *= t->shape[i])
        if (t->shape[i] != 1 && t->strides != NULL && t->strides[i] != expected)
            return 0;
    return 1;
}

/* Whether the elements lie in memory one after another, in any order: channels-last and transposed tensors do. */
static int is_dense(const dl_tensor *t) {
    if (is_contiguous(t))
        return 1;
    uint64_t placed = 0;
    int64_t expected = 1;
    for (int left = t->dimensions; left > 0; left--) {
        int next = -1, waits = 0;
        for (int i = 0; i < t->dimensions && i < 64; i++) {
            int waiting = t->shape[i] != 1 && !(placed >> i & 1);
            waits |= waiting;
            if (waiting && t->strides[i] == expected)
                next = i;
        }
        if (next < 0)
            return !waits && t->dimensions <= 64;
        placed |= (uint64_t)1 << next;
        expected *= t->shape[next];
    }
    return t->dimensions <= 64;
}

static int64_t size_of(const dl_tensor *t) {
    int64_t size = 1;
    for (int i = 0; i < t->dimensions; i++)
        size *= t->shape[i];
    return size;
}

/* Addresses below are looked at twice: a view of memory that was released lies at its place in it, counted from 0. */
#define LOW ((uintptr_t)1 << 36)

/* Whether the memory of a tensor with elements was released; -1 with an error. */
static int is_released(PyObject *x, const dl_tensor *t, uintptr_t address) {
    if (address >= LOW || size_of(t) == 0)
        return 0;
    PyObject *offset = PyObject_CallMethod(x, "storage_offset", NULL);
    uint64_t before = offset == NULL ? 0 : PyLong_AsUnsignedLongLong(offset);
    Py_XDECREF(offset);
    return PyErr_Occurred() ? -1 : (uint64_t)address == before * t->dtype.bits / 8;
}

/* Writes what is described of a tensor, at most `room` numbers; returns how many there are. */
static int64_t describe_one(PyObject *x, const dl_tensor *t, int64_t *to, int64_t room) {
    int64_t count = 4 + t->dimensions;
    if (count > room)
        return count;
    to[0] = (int64_t)(intptr_t)Py_TYPE(x);
    to[1] = (int64_t)t->device.type << 32 | (uint32_t)t->device.id;
    to[2] = (int64_t)t->dtype.code << 32 | (int64_t)t->dtype.bits << 16 | t->dtype.lanes;
    to[3] = t->dimensions;
    memcpy(to + 4, t->shape, (size_t)t->dimensions * sizeof *to);
    return count;
}

/* Returns how many numbers describe a tensor, 0 if it is not dense or has no memory of its own, -1 with an error. */
static int64_t look_at(const dl_functions *dl, PyObject *x, int64_t *to, int64_t room, void **data) {
    dl_tensor t = {0};
    if (dl->borrow(x, &t)) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear(); /* sparse and nested tensors, and values inside a transform */
        return 0;
    }
    *data = (char *)t.data + t.byte_offset;
    int released = is_released(x, &t, (uintptr_t)*data);
    if (released)
        return released < 0 ? -1 : 0;
    return is_dense(&t) ? describe_one(x, &t, to, room) : 0;
}

/* describe(functions, tensors): bytes, or None */
static PyObject *describe(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    const dl_functions *dl = count == 2 ? functions_in(args[0]) : NULL;
    if (dl == NULL)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "describe: %zd arguments; allowed: 2", count);
    Py_ssize_t n = PySequence_Size(args[1]), used = 0, room = 16 * (n + 1) + 64;
    int64_t *to = n < 0 ? NULL : PyMem_Malloc((size_t)room * sizeof *to);
    if (to == NULL)
        return n < 0 ? NULL : PyErr_NoMemory();
    int64_t found = 1;
    for (Py_ssize_t i = 0; i < n && found > 0; i++) {
        PyObject *x = PySequence_GetItem(args[1], i);
        void *data;
        found = x == NULL ? -1 : look_at(dl, x, to + used, room - used, &data);
        if (found > room - used)
            found = 0; /* more than 16 dimensions on average */
        Py_XDECREF(x);
        used += found > 0 ? (Py_ssize_t)found : 0;
    }
    PyObject *description = NULL;
    if (found == 0)
        description = Py_NewRef(Py_None);
    else if (found > 0)
        description = PyBytes_FromStringAndSize((const char *)to, used * (Py_ssize_t)sizeof *to);
    PyMem_Free(to);
    return description;
}

#define MOST_DIMENSIONS 64

/* Returns the address of a tensor that is as `*expected` says, which then points behind it, else None. */
static PyObject *address_of_described(
    const dl_functions *dl, PyObject *x, const int64_t **expected, const int64_t *end, PyObject *is_negated) {
    int64_t now[4 + MOST_DIMENSIONS];
    void *data = NULL;
    if (x == NULL || *expected >= end || (int64_t)(intptr_t)Py_TYPE(x) != **expected)
        return x == NULL ? NULL : Py_NewRef(Py_None); /* a type that was not described may have no memory at all */
    int64_t count = look_at(dl, x, now, 4 + MOST_DIMENSIONS, &data);
    if (count < 0)
        return NULL;
    if (count == 0 || count > end - *expected || count > 4 + MOST_DIMENSIONS ||
        memcmp(now, *expected, (size_t)count * sizeof *now))
        return Py_NewRef(Py_None);
    *expected += count;
    PyObject *negated = PyObject_CallFunctionObjArgs(is_negated, x, NULL);
    if (negated == NULL)
        return NULL;
    int differs = negated != Py_False;
    Py_DECREF(negated);
    return differs ? Py_NewRef(Py_None) : PyLong_FromVoidPtr(data);
}

/* Takes the arguments of both functions below: functions, tensor or tensors, description, method. */
static const dl_functions *take_description(
    PyObject *const *args, Py_ssize_t count, const int64_t **expected, const int64_t **end) {
    char *bytes;
    Py_ssize_t length;
    if (count != 4) {
        PyErr_Format(PyExc_TypeError, "%zd arguments; allowed: 4", count);
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[2], &bytes, &length))
        return NULL;
    *expected = (const int64_t *)bytes;
    *end = *expected + length / (Py_ssize_t)sizeof **expected;
    return functions_in(args[0]);
}

static PyObject *described_address(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    const int64_t *expected, *end;
    const dl_functions *dl = take_description(args, count, &expected, &end);
    return dl == NULL ? NULL : address_of_described(dl, args[1], &expected, end, args[3]);
}

static PyObject *described_addresses(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    const int64_t *expected, *end;
    const dl_functions *dl = take_description(args, count, &expected, &end);
    Py_ssize_t n = dl == NULL ? -1 : PySequence_Size(args[1]);
    PyObject *addresses = n < 0 ? NULL : PyList_New(n);
    for (Py_ssize_t i = 0; addresses != NULL && i < n; i++) {
        PyObject *x = PySequence_GetItem(args[1], i);
        PyObject *address = address_of_described(dl, x, &expected, end, args[3]);
        Py_XDECREF(x);
        if (address == NULL || address == Py_None) {
            Py_DECREF(addresses);
            return address;
        }
        PyList_SetItem(addresses, i, address);
    }
    return addresses;
}
