/* Notes the tensors of a step that several series share, and keeps those of a device until they are read together.
 *
 * It is the short way of collectors/torch/rows/shared_rows.py, which hands over its dictionaries and lists: where
 * anything is not as in the step before, nothing is noted, and Python's way does the whole.
 */

/* What `share` is given: the members of a tuple. */
enum { SEEN, USUAL, IDS, LAYOUTS, ALIASES, SOURCES, WHOLE_OF, LAYOUT_OF, IS_NEGATED, NOTED, CAPTURED, HOST_ROWS, ALIASED, OTHERWISE, STATE_MEMBERS };

/* What is usual for a series, the first members of a tuple. Of a tensor in host memory, the first two are all. */
enum { DESCRIPTION, LAYOUT, FACTS, SPECIAL, WAITING, ON_HOST = 2 };

/* What waits to be read on a device: the members of a tuple, of which the first five are lists of equal length. */
enum { POSITIONS, TENSORS, VERSIONS, ADDRESSES, ALL_FACTS, TOTAL, MOST, MOST_BYTES, STREAM_NUMBER, STREAM };

#define EMPTY_ADDRESS (-1) /* of a tensor without elements, whose memory is at 0 */
#define FACTS_BYTES 2 /* the member of a tensor's facts that tells the bytes of its storage */

/* A tensor, the tensor that it is a view of (or itself), that one's count of changes, and its address as a number. */
typedef struct {
    PyObject *state, *series, *x, *whole, *version, *key;
    int is_part; /* a view of some elements: it keeps more memory in use than its own */
} shared;

static struct {
    PyObject *base, *version, *requires_grad, *detach;
} names;

static int intern_names(void) {
    names.base = PyUnicode_InternFromString("_base");
    names.version = PyUnicode_InternFromString("_version");
    names.requires_grad = PyUnicode_InternFromString("requires_grad");
    names.detach = PyUnicode_InternFromString("detach");
    return names.base == NULL || names.version == NULL || names.requires_grad == NULL || names.detach == NULL ? -1 : 0;
}

static PyObject *member(const shared *s, Py_ssize_t i) { return PyTuple_GetItem(s->state, i); }

/* Appends to a list, and gives up the reference. */
static int append(PyObject *list, PyObject *value) {
    int failed = value == NULL || PyList_Append(list, value);
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

/* Adds one row to the record. */
static int append_row(const shared *s, PyObject *layout) {
    return layout == NULL || PyList_Append(member(s, LAYOUTS), layout) || PyList_Append(member(s, IDS), s->series) ? -1
                                                                                                                : 0;
}

/* Whether the tensor was met in this step and has not changed since; -1 with an error. */
static int is_known(const shared *s, PyObject *known) {
    int same = PyObject_RichCompareBool(PyTuple_GetItem(known, 1), s->version, Py_EQ);
    if (same != 1)
        return same;
    PyObject *alive = PyObject_CallNoArgs(PyTuple_GetItem(known, 0));
    Py_XDECREF(alive);
    return alive == NULL ? -1 : alive == s->whole;
}

/* What a view is to its base: PART of it, ALL of its elements, or all IN_ORDER; -1 with an error. */
enum { PART, ALL, IN_ORDER };

static int covers(const dl_functions *dl, const shared *s, PyObject *base) {
    dl_tensor view = {0}, all = {0};
    if (dl->borrow(s->x, &view) || dl->borrow(base, &all)) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1; /* such as Ctrl-C */
        PyErr_Clear(); /* Python's way says what is wrong */
        PyObject *whole = PyObject_CallFunctionObjArgs(member(s, WHOLE_OF), s->x, NULL);
        Py_XDECREF(whole);
        return whole == NULL ? -1 : whole == base ? IN_ORDER : PART;
    }
    if (memcmp(&view.dtype, &all.dtype, sizeof view.dtype) || size_of(&view) != size_of(&all))
        return PART;
    if (!is_contiguous(&view) || !is_contiguous(&all))
        return ALL;
    PyObject *negated = PyObject_CallFunctionObjArgs(member(s, IS_NEGATED), s->x, NULL);
    Py_XDECREF(negated);
    return negated == NULL ? -1 : negated == Py_False ? IN_ORDER : ALL;
}

/* Finds what the tensor is a view of, or that it is whole itself. */
static int find_whole(const dl_functions *dl, shared *s) {
    PyObject *base = PyObject_GetAttr(s->x, names.base);
    if (base == NULL)
        return -1;
    int covered = base == Py_None ? ALL : covers(dl, s, base);
    s->is_part = covered == PART;
    s->whole = covered < 0 ? NULL : Py_NewRef(covered == IN_ORDER ? base : s->x);
    Py_DECREF(base);
    return covered < 0 ? -1 : 0;
}

/* Returns the address of a tensor that is as usual, else None. */
static PyObject *usual_address(const dl_functions *dl, const shared *s, PyObject *description) {
    char *bytes;
    Py_ssize_t length;
    if (!PyBytes_Check(description))
        Py_RETURN_NONE;
    if (PyBytes_AsStringAndSize(description, &bytes, &length))
        return NULL;
    const int64_t *expected = (const int64_t *)bytes;
    return address_of_described(dl, s->x, &expected, expected + length / (Py_ssize_t)sizeof *expected,
                                member(s, IS_NEGATED));
}

/* Returns the layout of a tensor, and remembers it for the series where the tensor can be described. */
static PyObject *layout_anew(const dl_functions *dl, const shared *s) {
    int64_t now[4 + MOST_DIMENSIONS];
    void *data;
    PyObject *layout = PyObject_CallFunctionObjArgs(member(s, LAYOUT_OF), s->x, NULL);
    int64_t count = layout == NULL ? -1 : look_at(dl, s->x, now, 4 + MOST_DIMENSIONS, &data);
    if (count > 0 && count <= 4 + MOST_DIMENSIONS) {
        PyObject *described = PyBytes_FromStringAndSize((const char *)now, count * (Py_ssize_t)sizeof *now);
        PyObject *aliased = described == NULL ? NULL : PyTuple_Pack(2, described, layout);
        if (aliased == NULL || PyDict_SetItem(member(s, ALIASED), s->series, aliased))
            count = -1;
        Py_XDECREF(described);
        Py_XDECREF(aliased);
    }
    if (count < 0)
        Py_CLEAR(layout);
    return layout;
}

/* Returns the layout of a tensor whose values another series has: that of the step before, where it is as it was then. */
static PyObject *layout_of_alias(const dl_functions *dl, const shared *s) {
    PyObject *aliased = Py_XNewRef(PyDict_GetItemWithError(member(s, ALIASED), s->series)), *layout = NULL;
    if (aliased == NULL)
        return PyErr_Occurred() ? NULL : layout_anew(dl, s);
    PyObject *address = usual_address(dl, s, PyTuple_GetItem(aliased, DESCRIPTION));
    if (address != NULL)
        layout = address == Py_None ? layout_anew(dl, s) : Py_NewRef(PyTuple_GetItem(aliased, LAYOUT));
    Py_XDECREF(address);
    Py_DECREF(aliased);
    return layout;
}

/* Adds a row that has the values of one before. */
static int append_alias(const dl_functions *dl, const shared *s, PyObject *known) {
    PyObject *source = PyTuple_GetItem(known, 2), *layouts = member(s, LAYOUTS), *layout;
    if (s->whole == s->x && PyTuple_GetItem(known, 3) == Py_True)
        layout = Py_XNewRef(PyList_GetItem(layouts, PyLong_AsSsize_t(source)));
    else
        layout = layout_of_alias(dl, s);
    int failed = layout == NULL || append(member(s, ALIASES), PyLong_FromSsize_t(PyList_Size(member(s, IDS)))) ||
                 PyList_Append(member(s, SOURCES), source) || append_row(s, layout);
    Py_XDECREF(layout);
    return failed ? -1 : 0;
}

/* Whether the tensors that wait were made on the stream that is now the current one; -1 with an error. */
static int is_same_stream(PyObject *waiting) {
    PyObject *number = PyObject_CallNoArgs(PyTuple_GetItem(waiting, STREAM_NUMBER));
    int same = number == NULL ? -1 : PyObject_RichCompareBool(number, PyList_GetItem(PyTuple_GetItem(waiting, STREAM), 0), Py_EQ);
    Py_XDECREF(number);
    return same;
}

/* Returns a tensor of the same values that does not keep the graph alive, and shares the count of changes. */
static PyObject *without_graph(PyObject *x) {
    PyObject *requires_grad = PyObject_GetAttr(x, names.requires_grad);
    Py_XDECREF(requires_grad); /* True and False live on */
    if (requires_grad == NULL)
        return NULL;
    return requires_grad == Py_True ? PyObject_CallMethodObjArgs(x, names.detach, NULL) : Py_NewRef(x);
}

/* Remembers that the tensor has a row at a position. */
static int remember(const shared *s, PyObject *position) {
    PyObject *reference = PyWeakref_NewRef(s->whole, NULL);
    PyObject *seen = reference == NULL ? NULL : PyTuple_Pack(4, reference, s->version, position, s->whole == s->x ? Py_True : Py_False);
    int failed = seen == NULL || PyDict_SetItem(member(s, SEEN), s->key, seen) || PyList_Append(member(s, NOTED), s->key);
    Py_XDECREF(reference);
    Py_XDECREF(seen);
    return failed ? -1 : 0;
}

/* Keeps a tensor until it is read with others; returns True where enough wait, else None. */
static PyObject *keep(const shared *s, PyObject *usual, PyObject *address) {
    PyObject *waiting = PyTuple_GetItem(usual, WAITING), *facts = PyTuple_GetItem(usual, FACTS);
    PyObject *total = PyTuple_GetItem(waiting, TOTAL), *positions = PyTuple_GetItem(waiting, POSITIONS);
    int64_t bytes = PyLong_AsLongLong(PyList_GetItem(total, 0)) + PyLong_AsLongLong(PyTuple_GetItem(facts, FACTS_BYTES));
    PyObject *kept = PyErr_Occurred() ? NULL : without_graph(s->x);
    PyObject *position = kept == NULL ? NULL : PyLong_FromSsize_t(PyList_Size(member(s, IDS)));
    int failed = position == NULL || remember(s, position) || PyList_Append(positions, position) ||
                 PyList_Append(PyTuple_GetItem(waiting, TENSORS), kept) ||
                 PyList_Append(PyTuple_GetItem(waiting, VERSIONS), s->version) ||
                 PyList_Append(PyTuple_GetItem(waiting, ADDRESSES), address) ||
                 PyList_Append(PyTuple_GetItem(waiting, ALL_FACTS), facts) ||
                 PyList_SetItem(total, 0, PyLong_FromLongLong(bytes)) || append_row(s, PyTuple_GetItem(usual, LAYOUT));
    Py_XDECREF(kept);
    Py_XDECREF(position);
    if (failed)
        return NULL;
    int full = PyList_Size(positions) >= PyLong_AsSsize_t(PyTuple_GetItem(waiting, MOST)) ||
               bytes >= PyLong_AsLongLong(PyTuple_GetItem(waiting, MOST_BYTES));
    return Py_NewRef(full ? Py_True : Py_None);
}

/* Reads a tensor in host memory at once, if it is as usual: returns 1, 0 or, with an error, -1. */
static int read_usual(const dl_functions *dl, const shared *s, PyObject *usual) {
    char *bytes;
    Py_ssize_t length;
    array a;
    if (PyBytes_AsStringAndSize(PyTuple_GetItem(usual, DESCRIPTION), &bytes, &length))
        return -1;
    const int64_t *expected = (const int64_t *)bytes, *end = expected + length / (Py_ssize_t)sizeof *expected;
    int found = take_described(dl, s->x, &expected, end, member(s, IS_NEGATED), &a);
    Py_ssize_t at = PyList_Size(member(s, IDS)); /* now: another thread may have added rows meanwhile */
    if (found == 1)
        found = write_at(member(s, HOST_ROWS), at, &a, 1, a.n, 0, 1.0);
    if (found != 1)
        return found;
    PyObject *position = PyLong_FromSsize_t(at);
    int failed = position == NULL || remember(s, position) || append_row(s, PyTuple_GetItem(usual, LAYOUT));
    Py_XDECREF(position);
    return failed ? -1 : 1;
}

/* Does what `keep` does for a tensor of a device, if all is as usual; returns a tuple where it is not. */
static PyObject *keep_as_usual(const dl_functions *dl, const shared *s, PyObject *usual) {
    int as_usual = usual != NULL && !s->is_part && PyTuple_GetItem(usual, SPECIAL) == Py_False;
    if (as_usual)
        as_usual = is_same_stream(PyTuple_GetItem(usual, WAITING));
    PyObject *address = as_usual == 1 ? usual_address(dl, s, PyTuple_GetItem(usual, DESCRIPTION)) : NULL;
    if (as_usual < 0 || (as_usual && address == NULL))
        return NULL;
    PyObject *result = NULL;
    if (as_usual && address != Py_None && PyObject_IsTrue(address))
        result = keep(s, usual, address);
    else
        result = PyTuple_Pack(2, s->whole, s->version);
    Py_XDECREF(address);
    return result;
}

/* Returns None where the tensor was read or kept, True where enough wait, or a tuple where it is not as usual. */
static PyObject *keep_if_usual(const dl_functions *dl, const shared *s) {
    PyObject *usual = Py_XNewRef(PyDict_GetItemWithError(member(s, USUAL), s->series)); /* another thread may replace it */
    PyObject *result = NULL;
    if (usual != NULL && PyTuple_Size(usual) == ON_HOST) {
        int read = read_usual(dl, s, usual);
        result = read < 0 ? NULL : read ? Py_NewRef(Py_None) : PyTuple_Pack(2, s->whole, s->version);
    } else if (usual != NULL || !PyErr_Occurred())
        result = keep_as_usual(dl, s, usual);
    Py_XDECREF(usual);
    return result;
}

static PyObject *share_whole(const dl_functions *dl, const shared *s) {
    PyObject *known = Py_XNewRef(PyDict_GetItemWithError(member(s, SEEN), s->key));
    int same = known != NULL ? is_known(s, known) : PyErr_Occurred() ? -1 : 0;
    if (same == 1 && append_alias(dl, s, known))
        same = -1;
    Py_XDECREF(known);
    if (same < 0)
        return NULL;
    return same ? Py_NewRef(Py_None) : keep_if_usual(dl, s);
}

/* Notes a tensor: None, True, False, or a tuple; see `SharedRows.settle`. */
static PyObject *note(const dl_functions *dl, shared *s) {
    if (find_whole(dl, s))
        return NULL;
    s->version = PyObject_GetAttr(s->whole, names.version);
    s->key = s->version == NULL ? NULL : PyLong_FromVoidPtr(s->whole);
    PyObject *result = s->key == NULL ? NULL : share_whole(dl, s);
    if (s->version == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear(); /* an inference tensor has no count of changes */
        result = Py_NewRef(Py_False);
    }
    Py_DECREF(s->whole);
    Py_XDECREF(s->version);
    Py_XDECREF(s->key);
    return result;
}

/* Whether the device's stream is captured, as the only item of a list says: a function, or None for no device. */
static int is_captured(PyObject *state) {
    PyObject *test = PyList_GetItem(PyTuple_GetItem(state, CAPTURED), 0);
    if (test == NULL || test == Py_None)
        return test == NULL ? -1 : 0;
    PyObject *found = PyObject_CallNoArgs(test);
    int captured = found == NULL ? -1 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return captured;
}

/* share(functions, state, series_id, tensor): None; see host_rows.pyi */
static PyObject *share(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    const dl_functions *dl = count == 4 ? functions_in(args[0]) : NULL;
    if (dl == NULL && PyErr_Occurred())
        return NULL;
    if (dl == NULL || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) != STATE_MEMBERS)
        return PyErr_Format(PyExc_TypeError, "share: needs functions, a state, a series and a tensor");
    if (!is_host(PyTuple_GetItem(args[1], HOST_ROWS)))
        return PyErr_Format(PyExc_TypeError, "share: needs a list of %d for the rows in host memory", HOST_MEMBERS);
    int captured = is_captured(args[1]);
    if (captured)
        return captured < 0 ? NULL : Py_NewRef(Py_None);
    shared s = {.state = args[1], .series = args[2], .x = args[3]};
    PyObject *noted = note(dl, &s);
    if (noted == NULL || noted == Py_None)
        return noted;
    PyObject *settled = PyObject_CallFunctionObjArgs(member(&s, OTHERWISE), s.series, s.x, noted, NULL);
    Py_DECREF(noted);
    return settled;
}

/* Whether a tensor has a count of changes and an address, of which 0 stands for `EMPTY_ADDRESS`; -1 with an error. */
static int is_intact(const dl_functions *dl, PyObject *x, PyObject *version, int64_t address) {
    dl_tensor t = {0};
    PyObject *now = PyObject_GetAttr(x, names.version);
    int same = now == NULL ? -1 : PyObject_RichCompareBool(now, version, Py_EQ);
    Py_XDECREF(now);
    if (same != 1)
        return same;
    if (dl->borrow(x, &t)) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear(); /* a memory that was taken away */
        return 0;
    }
    int64_t found = (int64_t)(intptr_t)t.data;
    return (found == 0 ? EMPTY_ADDRESS : found + (int64_t)t.byte_offset) == address;
}

/* are_intact(functions, tensors, versions, addresses): a list of bools; see host_rows.pyi */
static PyObject *are_intact(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    const dl_functions *dl = count == 4 ? functions_in(args[0]) : NULL;
    if (dl == NULL && PyErr_Occurred())
        return NULL;
    Py_ssize_t n = dl != NULL && PyList_Check(args[1]) ? PyList_Size(args[1]) : -1;
    if (n < 0 || !PyList_Check(args[2]) || !PyList_Check(args[3]) || PyList_Size(args[2]) != n ||
        PyList_Size(args[3]) != n)
        return PyErr_Format(PyExc_TypeError, "are_intact: needs functions and three lists of equal length");
    PyObject *found = PyList_New(n);
    for (Py_ssize_t i = 0; found != NULL && i < n; i++) {
        int64_t address = PyLong_AsLongLong(PyList_GetItem(args[3], i));
        int same = PyErr_Occurred() ? -1 : is_intact(dl, PyList_GetItem(args[1], i), PyList_GetItem(args[2], i), address);
        if (same < 0)
            Py_CLEAR(found);
        else
            PyList_SetItem(found, i, Py_NewRef(same ? Py_True : Py_False));
    }
    return found;
}
