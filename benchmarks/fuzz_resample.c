/* Calls the compiled resize with random arguments under sanitizers, and checks pixels against plain loops.

     gcc -O2 -g -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all $(python3-config --includes) \
         benchmarks/fuzz_resample.c -o build/fuzz_resample $(python3-config --embed --ldflags) -lm
     ASAN_OPTIONS=detect_leaks=0 build/fuzz_resample [COUNT] [SEED]

   Each buffer is allocated for its call and has no byte more than it needs. Of 8 calls, 7 call `resize` with valid
   arguments and one calls what Python sees. The first error ends the program; else it prints its counts. */

#include "../beam_pipeline/images/resample.c"

#include <float.h>
#include <stdio.h>
#include <time.h>

static uint64_t state;

static uint64_t draw(void) { /* splitmix64 */
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int below(int count) { return (int)(draw() % (uint64_t)count); }

static double fraction(void) { return (double)(draw() >> 11) / (double)(UINT64_C(1) << 53); }

static int side(void) {
    int size = below(1000);
    if (size == 0 && below(20) == 0) return 1 + below(40000);
    return 1 + below(size < 2 ? 300 : size < 30 ? 60 : 12);
}

static void edges_of(float *begin, float *end, int size) {
    double a = fraction() * size, b = fraction() * size;
    switch (below(6)) {
    case 0: a = 0, b = size; break;
    case 1: a = floor(a), b = ceil(b); break;
    case 2: b = a + fraction() * 1e-6; break;
    case 3: b = a = below(2) ? below(size + 1) : a; break;
    case 4: a = nextafterf(size, 0), b = size; break;
    }
    if (b > size) b = size;
    *begin = (float)(a < b ? a : b);
    *end = (float)(a < b ? b : a);
}

/* An image in an exact buffer, which is returned. Rows are apart and may run upwards. */
static uint8_t *make(Image *image, int height, int width, int pixel) {
    Py_ssize_t used = (Py_ssize_t)width * pixel, row = used + (below(3) ? 0 : below(40));
    size_t bytes = (size_t)(row * (height - 1) + used);
    uint8_t *memory = malloc(bytes), *data = memory;
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t some = draw();
        memcpy(memory + i, &some, bytes - i < 8 ? bytes - i : 8);
    }
    if (!below(8)) data += row * (height - 1), row = -row;
    *image = (Image){data, height, width, pixel, row};
    return memory;
}

/* What Pillow's loops give, one byte at a time. */
static int equals_plain_loops(const Image *in, const Image *out, const float edges[4]) {
    Axis columns = {0}, rows = {0};
    int width = (int)out->width, channels = (int)out->pixel, equal = 1;
    weigh(&columns, (int)in->width, edges[0], edges[2], width);
    weigh(&rows, (int)in->height, edges[1], edges[3], (int)out->height);
    uint8_t *between = malloc((size_t)in->height * width * channels);
    for (int y = 0; y < in->height; y++)
        for (int x = 0; x < width; x++)
            for (int c = 0; c < channels; c++) {
                uint32_t sum = 1 << (WEIGHT_BITS - 1);
                for (int i = 0; i < columns.count[x]; i++)
                    sum += in->data[y * in->row + (columns.first[x] + i) * in->pixel + c] *
                           (uint32_t)columns.weights[x * columns.taps + i];
                between[((size_t)y * width + x) * channels + c] = (uint8_t)(sum >> WEIGHT_BITS);
            }
    for (int y = 0; y < out->height; y++)
        for (int x = 0; x < width * channels; x++) {
            uint32_t sum = 1 << (WEIGHT_BITS - 1);
            for (int i = 0; i < rows.count[y]; i++)
                sum += between[(size_t)(rows.first[y] + i) * width * channels + x] *
                       (uint32_t)rows.weights[y * rows.taps + i];
            equal &= out->data[y * out->row + x] == sum >> WEIGHT_BITS;
        }
    free(between);
    free(columns.first), free(columns.weights), free(rows.first), free(rows.weights);
    return equal;
}

/* Valid arguments. */
static void fuzz_core(void) {
    Image in, out;
    int size = below(3) == 0 ? 1 : below(2) ? 3 : 4;
    uint8_t *source = make(&in, side(), side(), size), *target = make(&out, side(), side(), size == 4 ? 3 : size);
    float edges[4];
    edges_of(&edges[0], &edges[2], (int)in.width);
    edges_of(&edges[1], &edges[3], (int)in.height);
    if (!resize(&in, &out, edges)) abort();
    if (!below(8) && !equals_plain_loops(&in, &out, edges)) {
        printf("%zdx%zd to %zdx%zd [%a %a %a %a] differs from plain loops\n", in.height, in.width, out.height, out.width,
               edges[0], edges[1], edges[2], edges[3]);
        abort();
    }
    free(source);
    free(target);
}

static float any_edge(float valid) {
    const float edges[] = {NAN,     INFINITY, -INFINITY, -0.0f, -1.0f, FLT_MIN / 4, -FLT_MIN / 4, FLT_MAX, 0x1p31f,
                           -0x1p31f, 0x1p63f, nextafterf(valid, INFINITY), nextafterf(valid, -INFINITY)};
    return below(6) ? valid : edges[below(sizeof edges / sizeof *edges)];
}

static Py_ssize_t any_side(Py_ssize_t valid) {
    const Py_ssize_t sides[] = {0, -1, 1, MAX_SIDE, MAX_SIDE + 1, INT32_MAX, (Py_ssize_t)UINT32_MAX + 1, PY_SSIZE_T_MAX,
                                PY_SSIZE_T_MIN, valid + 1, valid - 1};
    return below(12) ? valid : sides[below(sizeof sides / sizeof *sides)];
}

/* A view of an image as Python code may make one, valid or not. */
static PyObject *any_view(const Image *image, int channels) {
    Py_ssize_t shape[] = {image->height, image->width, channels}, strides[] = {image->row, image->pixel, 1};
    static char formats[][2] = {"B", "b", "H"};
    int bad = below(30), empty = below(60), format = bad < 2 ? bad + 1 : 0;
    if (bad == 2) strides[1] *= 2, shape[1] = (shape[1] + 1) / 2;
    if (bad == 3) strides[0] = 0;
    if (bad == 4) strides[2] = 0;
    if (empty < 3) shape[empty] = 0;
    Py_buffer buffer = {.buf = image->data, .len = shape[0] * shape[1] * shape[2], .itemsize = 1, .ndim = bad == 5 ? 2 : 3,
                        .readonly = bad == 6, .format = formats[format], .shape = shape, .strides = strides};
    return PyMemoryView_FromBuffer(&buffer);
}

static void let_go(struct ArrowArray *array) { (void)array; }

/* Any arguments. Returns how many calls were accepted. */
static int fuzz_python(void) {
    Image in, out;
    int size = below(3) == 0 ? 1 : below(2) ? 3 : 4;
    uint8_t *source = make(&in, side(), side(), size), *target = make(&out, side(), side(), size == 4 ? 3 : size);
    Py_ssize_t height = any_side(in.height), width = any_side(in.width);
    float edges[4];
    edges_of(&edges[0], &edges[2], (int)in.width);
    edges_of(&edges[1], &edges[3], (int)in.height);
    const void *buffers[] = {NULL, below(30) ? in.data : NULL}, *none[] = {NULL, NULL};
    struct ArrowArray bytes = {.length = any_side(in.height * in.width * 4), .n_buffers = 2 - !below(40),
                               .buffers = buffers, .release = let_go};
    struct ArrowArray *children[] = {&bytes};
    struct ArrowArray array = {.length = in.height * in.width, .offset = !below(40), .n_buffers = 1, .buffers = none,
                               .n_children = below(40) ? 1 : below(2), .children = children,
                               .release = below(40) ? let_go : NULL};
    int as_capsule = size == 4 && in.row == in.width * size && below(8);
    PyObject *from = as_capsule ? PyCapsule_New(&array, "arrow_array", NULL) : any_view(&in, size == 4 && below(2) ? 3 : size);
    PyObject *to = below(40) ? any_view(&out, (int)out.pixel) : PyBytes_FromString("bytes"), *result = NULL;
    if (from && to) {
        PyObject *args = Py_BuildValue("OO(ffff)(nn)", from, to, any_edge(edges[0]), any_edge(edges[1]), any_edge(edges[2]),
                                       any_edge(edges[3]), height, width);
        result = py_resize(NULL, args);
        Py_DECREF(args);
    }
    if (!result == !PyErr_Occurred()) abort();
    int accepted = result != NULL;
    PyErr_Clear();
    Py_XDECREF(result);
    result = to ? py_mirror(NULL, to) : NULL;
    accepted += result != NULL;
    PyErr_Clear();
    Py_XDECREF(result);
    Py_XDECREF(from);
    Py_XDECREF(to);
    free(source);
    free(target);
    return accepted;
}

int main(int argc, char **argv) {
    long long count = argc > 1 ? atoll(argv[1]) : 1000000, calls[2] = {0}, accepted = 0;
    state = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    (void)PyInit__resample;
    Py_InitializeEx(0);
    for (long long i = 0; i < count; i++) {
        int python = below(8) == 0;
        calls[python]++;
        if (python)
            accepted += fuzz_python();
        else
            fuzz_core();
    }
    printf("%lld calls of resize, and %lld of it and of mirror from Python, of which %lld were accepted: nothing found in "
           "%.0f CPU seconds\n", calls[0], calls[1], accepted, (double)clock() / CLOCKS_PER_SEC);
    return 0;
}
