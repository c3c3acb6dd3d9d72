/* Pillow's bilinear resize of 8-bit images, bit for bit and several times as fast; `resize.py` is its only caller.

   The algorithm is that of Pillow's Resample.c. Along each axis, an output pixel is a weighted mean of source pixels
   under a filter that is as wide as the axis shrinks, so it doesn't alias. Weights are computed in double, then rounded
   to integers of 22 binary places; sums are 32-bit integers. First each row is resized to the new width and rounded to
   bytes, then each column to the new height.

   What makes it fast: a pixel is one 32-bit integer, and LANES pixels are one of the compiler's portable vectors.
   Integer sums are exact in any order, so the result can't differ from Pillow's. For rows, a vector has the pixels at
   the same x of LANES rows, which share their weights; rows are transposed for it. For columns, it has neighbours.

   Nothing here touches a Python object while it computes, so the GIL is released. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* one binary for Python 3.11 and later: the first with buffers in the stable ABI */
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are arguments of inlined functions only */
#ifdef __x86_64__
#define VECTORS __attribute__((target("avx2"))) /* of 32 bytes; the module can't be imported on a CPU without them */
enum { LANES = 8 };
#else
#define VECTORS
enum { LANES = 4 };
#endif
#ifdef __clang__
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__}) /* GCC has the other from 12 on */
#endif
#define INLINE static inline __attribute__((always_inline))

enum {
    WEIGHT_BITS = 22,   /* Pillow's: 8 more for a pixel, and 2 for filters with negative weights, make 32 */
    MAX_SIDE = 1 << 20, /* pixels: no index here overflows */
    MAX_SCALE = 4000    /* so many source pixels of one: the weights, all rounded up, don't make 256 of 255 */
};

typedef uint32_t Pixels __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* red in the lowest byte */
typedef uint32_t Four __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));

/* Pixels in memory, side by side, of `pixel` bytes: 1, 3, or 4 of which 3 count. `row` bytes from a row to the next. */
typedef struct {
    uint8_t *data;
    Py_ssize_t height, width, pixel, row;
} Image;

/* What the output's pixels along one axis are made of: pixel i of count[i] source pixels from first[i] on, whose
   weights begin at weights[i * taps]. All are in [begin, end). */
typedef struct {
    int taps, begin, end, *first, *count;
    int32_t *weights;
} Axis;

/* --- Weights: Pillow's `precompute_coeffs` and `normalize_coeffs_8bpc`, operation by operation --- */

/* Fill in an axis of `out` pixels made of [low, high) of `in` pixels. Returns 0 if there is no memory. */
static int weigh(Axis *axis, int in, float low, float high, int out) {
    double scale = (double)(high - low) / out, support = scale < 1.0 ? 1.0 : scale, inverse = 1.0 / support;
    axis->taps = (int)ceil(support) * 2 + 1;
    axis->begin = in;
    axis->first = calloc(2 * (size_t)out, sizeof *axis->first);
    axis->weights = calloc((size_t)out * axis->taps, sizeof *axis->weights);
    double *exact = malloc(axis->taps * sizeof *exact);
    int done = axis->first && axis->weights && exact;
    axis->count = axis->first + out;
    for (int i = 0; done && i < out; i++) {
        double center = low + (i + 0.5) * scale, sum = 0.0;
        int first = (int)(center - support + 0.5), end = (int)(center + support + 0.5);
        if (first < 0) first = 0;
        if (first > in - 1) first = in - 1; /* by rounding only; Pillow has no need of it */
        if (end > in) end = in;
        int count = end - first < 0 ? 0 : end - first < axis->taps ? end - first : axis->taps;
        for (int x = 0; x < count; x++) {
            double distance = fabs((x + first - center + 0.5) * inverse);
            sum += exact[x] = distance < 1.0 ? 1.0 - distance : 0.0;
        }
        for (int x = 0; x < count; x++) {
            double weight = (sum != 0.0 ? exact[x] / sum : exact[x]) * (1 << WEIGHT_BITS);
            axis->weights[(size_t)i * axis->taps + x] = (int32_t)(0.5 + weight);
        }
        axis->first[i] = first;
        axis->count[i] = count;
        if (first < axis->begin) axis->begin = first;
        if (first + count > axis->end) axis->end = first + count;
    }
    free(exact);
    return done;
}

/* --- Sums --- */

/* The sum of `count` vectors, `step` integers from one to the next, each times its weight, for each of the channels:
   Pillow's inner loop without its `clip8`, since no weight is negative. */
INLINE void weighted(const uint32_t *from, Py_ssize_t step, const int32_t *weights, int count, int channels,
                     Pixels *out) {
    Pixels sums[4], result = {0};
    for (int c = 0; c < channels; c++) sums[c] = (Pixels){0} + (1 << (WEIGHT_BITS - 1));
    for (int i = 0; i < count; i++, from += step) {
        Pixels pixels = *(const Pixels *)from;
        for (int c = 0; c < channels; c++) sums[c] += (pixels >> 8 * c & 255) * (uint32_t)weights[i];
    }
    for (int c = 0; c < channels; c++) result |= (sums[c] >> WEIGHT_BITS) << 8 * c;
    *out = result;
}

/* The columns of 4 rows of 4 pixels as rows. */
INLINE void transpose(const Four rows[4], Four *out, Py_ssize_t step) {
    Four a = SHUFFLE(Four, rows[0], rows[1], 0, 4, 1, 5), b = SHUFFLE(Four, rows[0], rows[1], 2, 6, 3, 7);
    Four c = SHUFFLE(Four, rows[2], rows[3], 0, 4, 1, 5), d = SHUFFLE(Four, rows[2], rows[3], 2, 6, 3, 7);
    out[0] = SHUFFLE(Four, a, c, 0, 1, 4, 5);
    out[step] = SHUFFLE(Four, a, c, 2, 3, 6, 7);
    out[2 * step] = SHUFFLE(Four, b, d, 0, 1, 4, 5);
    out[3 * step] = SHUFFLE(Four, b, d, 2, 3, 6, 7);
}

/* 4 pixels; reads 16 bytes. */
INLINE Four load(const uint8_t *from, int size) {
    if (size == 4) return *(const Four *)from;
    Bytes bytes = *(const Bytes *)from;
    return (Four)SHUFFLE(Bytes, bytes, bytes, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11);
}

/* The bytes of 4 pixels that count; writes 16. */
INLINE void store(Four pixels, uint8_t *to, int channels) {
    Bytes bytes = (Bytes)pixels;
    *(Bytes *)to = channels == 1 ? SHUFFLE(Bytes, bytes, bytes, 0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
                                 : SHUFFLE(Bytes, bytes, bytes, 0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0);
}

/* Source pixels [begin, end) of LANES rows, transposed: `out[x]` holds the pixels x of all rows. */
INLINE void gather(const uint8_t *const source[LANES], int size, int begin, int end, uint32_t *out) {
    int x = begin;
    if (size != 1)
        for (; x + 6 <= end; x += 4)
            for (int half = 0; half < LANES; half += 4) {
                Four rows[4];
                for (int r = 0; r < 4; r++) rows[r] = load(source[half + r] + (Py_ssize_t)x * size, size);
                transpose(rows, (Four *)(out + (Py_ssize_t)(x - begin) * LANES + half), LANES / 4);
            }
    for (; x < end; x++)
        for (int r = 0; r < LANES; r++) {
            const uint8_t *pixel = source[r] + (Py_ssize_t)x * size;
            uint32_t others = size == 1 ? 0 : (uint32_t)pixel[1] << 8 | (uint32_t)pixel[2] << 16;
            out[(Py_ssize_t)(x - begin) * LANES + r] = pixel[0] | others;
        }
}

/* Resize LANES rows to the width of the axis, into packed bytes. `block` has room for them before and after. */
INLINE void rows_of(const Axis *axis, int width, const uint8_t *const source[LANES], uint32_t *block, uint8_t *out,
                    Py_ssize_t out_row, int size) {
    int channels = size == 1 ? 1 : 3;
    uint32_t *after = block + (Py_ssize_t)(axis->end - axis->begin) * LANES;
    gather(source, size, axis->begin, axis->end, block);
    for (Py_ssize_t x = 0; x < width; x++)
        weighted(block + (Py_ssize_t)(axis->first[x] - axis->begin) * LANES, LANES, axis->weights + x * axis->taps,
                 axis->count[x], channels, (Pixels *)(after + x * LANES));
    for (Py_ssize_t x = 0; x < width; x += 4)
        for (int half = 0; half < LANES; half += 4) {
            Four columns[4], rows[4];
            for (int i = 0; i < 4; i++) columns[i] = *(Four *)(after + (x + i) * LANES + half);
            transpose(columns, rows, 1);
            for (int r = 0; r < 4; r++) store(rows[r], out + (half + r) * out_row + x * channels, channels);
        }
}

VECTORS static void resize_rows(const Axis *axis, int width, const uint8_t *const source[LANES], uint32_t *block,
                               uint8_t *out, Py_ssize_t out_row, int size) { /* compiled for constants */
    if (size == 1)
        rows_of(axis, width, source, block, out, out_row, 1);
    else if (size == 3)
        rows_of(axis, width, source, block, out, out_row, 3);
    else
        rows_of(axis, width, source, block, out, out_row, 4);
}

/* One row of the output, `size` bytes, from `count` rows of the scratch. Here any 4 bytes are a pixel. */
VECTORS static void resize_column(const uint32_t *from, Py_ssize_t row, const int32_t *weights, int count, uint8_t *out,
                                 Py_ssize_t size) {
    for (Py_ssize_t x = 0; x < size; x += 4 * LANES, from += LANES) {
        Pixels pixels;
        weighted(from, row, weights, count, 4, &pixels);
        memcpy(out + x, &pixels, size - x < 4 * LANES ? (size_t)(size - x) : 4 * LANES);
    }
}

/* --- Images --- */

/* Resize what is inside of `edges` (left, top, right, bottom) of `in` to all of `out`, of 1 or 3 channels. Both may
   overlap. Returns 0 if there is no memory. */
static int resize(const Image *in, const Image *out, const float edges[4]) {
    Axis columns = {0}, rows = {0};
    uint32_t *scratch = NULL, *block = NULL;
    int width = (int)out->width, height = (int)out->height;
    int done = weigh(&columns, (int)in->width, edges[0], edges[2], width) &&
               weigh(&rows, (int)in->height, edges[1], edges[3], height);
    if (!done) goto end;
    Py_ssize_t room = (width + LANES - 1) / LANES * LANES, row = room * out->pixel / 4 + LANES; /* of the scratch */
    scratch = malloc((size_t)(rows.end - rows.begin + LANES) * row * sizeof *scratch);
    block = malloc((size_t)(columns.end - columns.begin + room) * LANES * sizeof *block);
    done = scratch && block;
    if (!done) goto end;
    for (int y = rows.begin; y < rows.end; y += LANES) {
        const uint8_t *source[LANES];
        for (int r = 0; r < LANES; r++) source[r] = in->data + (y + r < rows.end ? y + r : rows.end - 1) * in->row;
        resize_rows(&columns, width, source, block, (uint8_t *)(scratch + (y - rows.begin) * row), row * 4,
                    (int)in->pixel);
    }
    for (int y = 0; y < height; y++)
        resize_column(scratch + (rows.first[y] - rows.begin) * row, row, rows.weights + (Py_ssize_t)y * rows.taps,
                      rows.count[y], out->data + y * out->row, width * out->pixel);
end:
    free(columns.first), free(columns.weights), free(rows.first), free(rows.weights), free(scratch), free(block);
    return done;
}

/* Reverse the pixels of a row, of 1 or 3 bytes. `copy` has room for them and one vector. */
VECTORS static void reverse(uint8_t *row, Py_ssize_t width, int channels, uint8_t *copy) {
    Py_ssize_t x = 0, end = (width - 1) * channels;
    memcpy(copy, row, (size_t)(width * channels));
    if (channels == 3)
        for (; x < end - 15; x += 12) { /* 4 pixels; the 4 bytes before them are written again */
            Bytes bytes = *(const Bytes *)(copy + x);
            bytes = SHUFFLE(Bytes, bytes, bytes, 0, 0, 0, 0, 9, 10, 11, 6, 7, 8, 3, 4, 5, 0, 1, 2);
            *(Bytes *)(row + end - x - 13) = bytes;
        }
    for (; x <= end; x += channels)
        for (int c = 0; c < channels; c++) row[end - x + c] = copy[x + c];
}

/* --- Python --- */

/* What Pillow's images export without a copy: https://arrow.apache.org/docs/format/CDataInterface.html */
struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children, *dictionary;
    void (*release)(struct ArrowArray *), *private_data;
};

/* Pixels of an array of bytes [height, width, 1 or 3] whose rows are contiguous. Returns 0 if it isn't one. */
static int from_buffer(const Py_buffer *view, Image *image) {
    if (view->ndim != 3 || view->itemsize != 1 || !view->format || strcmp(view->format, "B") != 0) return 0;
    *image = (Image){view->buf, view->shape[0], view->shape[1], view->shape[2], view->strides[0]};
    return (image->pixel == 1 || (image->pixel == 3 && view->strides[2] == 1)) &&
           (image->width == 1 || view->strides[1] == image->pixel);
}

/* Pixels of a Pillow image of one block of memory, 4 bytes each. Returns 0 if they aren't. */
static int from_arrow(PyObject *capsule, Image *image) {
    const struct ArrowArray *array = PyCapsule_GetPointer(capsule, "arrow_array");
    if (!array || !array->release || array->offset || array->n_children != 1) return 0;
    const struct ArrowArray *bytes = array->children[0];
    if (bytes->n_buffers != 2 || bytes->length != image->height * image->width * 4) return 0;
    image->pixel = 4;
    image->row = image->width * 4;
    image->data = (uint8_t *)bytes->buffers[1];
    return image->data != NULL;
}

static int is_side(Py_ssize_t side) { return side >= 1 && side <= MAX_SIDE; }

static PyObject *py_resize(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *source, *target, *result = NULL;
    Image in = {0}, out = {0};
    Py_buffer from = {0}, to = {0};
    float edges[4]; /* as Pillow's: their rounding is part of the result */
    Py_ssize_t height, width;
    if (!PyArg_ParseTuple(args, "OO(ffff)(nn):resize", &source, &target, &edges[0], &edges[1], &edges[2], &edges[3],
                          &height, &width))
        return NULL;
    if (PyObject_GetBuffer(target, &to, PyBUF_STRIDES | PyBUF_FORMAT | PyBUF_WRITABLE) < 0) return NULL;
    int valid = is_side(height) && is_side(width) && from_buffer(&to, &out) && is_side(out.height) && is_side(out.width);
    if (PyCapsule_IsValid(source, "arrow_array")) {
        in = (Image){.height = height, .width = width};
        valid = valid && from_arrow(source, &in);
    } else if (PyObject_GetBuffer(source, &from, PyBUF_STRIDES | PyBUF_FORMAT) == 0)
        valid = valid && from_buffer(&from, &in) && in.height == height && in.width == width;
    else
        goto end;
    valid = valid && in.pixel - (in.pixel == 4) == out.pixel && edges[0] >= 0 && edges[0] <= edges[2] &&
            edges[2] <= width && edges[1] >= 0 && edges[1] <= edges[3] && edges[3] <= height &&
            edges[2] - edges[0] <= (float)MAX_SCALE * out.width && edges[3] - edges[1] <= (float)MAX_SCALE * out.height;
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "resize takes bytes [height, width, 1 or 3], edges inside and a scale up to 4000");
        goto end;
    }
    int done;
    Py_BEGIN_ALLOW_THREADS;
    done = resize(&in, &out, edges);
    Py_END_ALLOW_THREADS;
    result = done ? Py_NewRef(Py_None) : PyErr_NoMemory();
end:
    if (from.obj) PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    return result;
}

static PyObject *py_mirror(PyObject *Py_UNUSED(module), PyObject *target) {
    Image image;
    Py_buffer view;
    if (PyObject_GetBuffer(target, &view, PyBUF_STRIDES | PyBUF_FORMAT | PyBUF_WRITABLE) < 0) return NULL;
    int valid = from_buffer(&view, &image) && is_side(image.width);
    uint8_t *copy = valid ? malloc((size_t)(image.width * image.pixel) + sizeof(Bytes)) : NULL;
    for (Py_ssize_t y = 0; copy && y < image.height; y++)
        reverse(image.data + y * image.row, image.width, (int)image.pixel, copy);
    PyBuffer_Release(&view);
    free(copy);
    if (!valid) PyErr_SetString(PyExc_ValueError, "mirror takes bytes [height, width, 1 or 3]");
    return copy ? Py_NewRef(Py_None) : valid ? PyErr_NoMemory() : NULL;
}

static PyMethodDef METHODS[] = {
    {"resize", py_resize, METH_VARARGS,
     "resize(source, out, (left, top, right, bottom), (height, width))\n--\n\n"
     "Resize what is inside of the edges of `source`, of this size, to all of `out`, as Pillow does, without the GIL.\n"
     "source: bytes [height, width, 1 or 3], each row contiguous, or the \"arrow_array\" of a Pillow image RGB.\n"
     "out: such bytes, writable; may be the source. Per output pixel at most 4000 of the source's along each axis."},
    {"mirror", py_mirror, METH_O, "mirror(pixels)\n--\n\nReverse each row of bytes [height, width, 1 or 3]."},
    {0}};
static PyModuleDef_Slot SLOTS[] = {{0}};
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "_resample", .m_methods = METHODS, .m_slots = SLOTS};

PyMODINIT_FUNC PyInit__resample(void) {
#ifdef __x86_64__
    if (!__builtin_cpu_supports("avx2")) return PyErr_Format(PyExc_ImportError, "this CPU has no AVX2");
#endif
    return PyModuleDef_Init(&MODULE);
}
