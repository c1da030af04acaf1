/* Two sums, compiled, at the speed of memory: the digest's, which `weighing.InNumpy` computes (see `digest.py` for the
   formula), and that of squares on a grid, which `exact/squares.py` does.

   Built where the package is installed and a compiler is there; without it the numbers are the same, only later. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little endian"
#endif

/* One version for each generation of processors; the loader takes the best that the machine has. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address) ((void)0)
#endif

/* Bytes. A processor that sees a stream coming stops at the end of a page: the next one is asked for by hand. */
enum { UNIT = 8, LINE = 64, PAGE = 4096, PAGE_UNITS = PAGE / UNIT };

typedef struct {
    const uint64_t *low, *high;
    uint64_t units, seed;
} Weights;

FOR_EACH_PROCESSOR
static uint64_t whole_units(const unsigned char *data, const uint64_t *low, const uint64_t *high, uint64_t count)
{
    uint64_t sum = 0;
    for (uint64_t begin = 0; begin < count; begin += PAGE_UNITS) {
        uint64_t end = count - begin < PAGE_UNITS ? count : begin + PAGE_UNITS;
        for (uint64_t ahead = UNIT * begin + PAGE; ahead < UNIT * begin + 2 * PAGE && ahead < UNIT * count; ahead += LINE)
            FETCH(data + ahead);
        for (uint64_t i = begin; i < end; i++) {
            uint64_t unit;
            memcpy(&unit, data + UNIT * i, UNIT); /* a run may begin at any address */
            sum += unit * low[i] + (unit >> 32) * high[i];
        }
    }
    return sum;
}

/* `size` bytes from byte `at` of a unit on; zeros stand for the others. */
static uint64_t part_of_unit(const unsigned char *data, uint64_t size, uint64_t at, uint64_t low, uint64_t high)
{
    uint64_t unit = 0;
    memcpy((unsigned char *)&unit + at, data, size);
    return unit * low + (unit >> 32) * high;
}

/* `size` bytes from byte `at` of a block on, which they do not leave. */
static uint64_t in_block(const unsigned char *data, uint64_t size, uint64_t at, const Weights *weights)
{
    uint64_t unit = at / UNIT, lead = at % UNIT, sum = 0;
    if (lead) {
        uint64_t here = size < UNIT - lead ? size : UNIT - lead;
        sum = part_of_unit(data, here, lead, weights->low[unit], weights->high[unit]);
        data += here, size -= here, unit++;
    }
    uint64_t whole = size / UNIT, tail = size % UNIT;
    sum += whole_units(data, weights->low + unit, weights->high + unit, whole);
    if (tail) {
        unit += whole;
        sum += part_of_unit(data + UNIT * whole, tail, 0, weights->low[unit], weights->high[unit]);
    }
    return sum;
}

/* splitmix64 (Steele, Lea, Flood 2014; Vigna's constants), made odd. */
static uint64_t factor(uint64_t block, uint64_t seed)
{
    uint64_t mixed = (block + 1) * UINT64_C(0x9E3779B97F4A7C15) + seed;
    mixed = (mixed ^ (mixed >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (mixed ^ (mixed >> 31)) | 1;
}

static uint64_t run(const unsigned char *data, uint64_t length, uint64_t begin, const Weights *weights)
{
    uint64_t sum = 0, block_bytes = UNIT * weights->units;
    while (length) {
        uint64_t at = begin % block_bytes, here = block_bytes - at;
        if (here > length)
            here = length;
        sum += in_block(data, here, at, weights) * factor(begin / block_bytes, weights->seed);
        data += here, begin += here, length -= here;
    }
    return sum;
}

/* Whether `count` runs of `length` bytes, `stride` apart from byte `first` on, lie inside `size` bytes. */
static int are_inside(Py_ssize_t size, Py_ssize_t first, Py_ssize_t stride, Py_ssize_t count, Py_ssize_t length)
{
    if (count < 0 || length < 0 || first < 0 || length > size || first > size - length)
        return 0;
    if (count < 2 || stride == 0)
        return 1;
    if (stride > 0)
        return (size - length - first) / stride >= count - 1;
    return stride != PY_SSIZE_T_MIN && first / -stride >= count - 1;
}

static PyObject *runs(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data, low, high;
    Py_ssize_t first, stride, count, length, begin, step;
    unsigned long long seed;
    uint64_t sum = 0;
    int is_sound;
    if (!PyArg_ParseTuple(
            args, "y*nnnnnny*y*K", &data, &first, &stride, &count, &length, &begin, &step, &low, &high, &seed))
        return NULL;
    is_sound = low.len > 0 && low.len == high.len && low.len % UNIT == 0 && begin >= 0 && step >= 0
               && are_inside(data.len, first, stride, count, length);
    if (is_sound) {
        const unsigned char *at = (const unsigned char *)data.buf + first;
        Weights weights = {low.buf, high.buf, (uint64_t)low.len / UNIT, seed};
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t each = 0; each < count; each++)
            sum += run(at + each * stride, (uint64_t)length, (uint64_t)begin + (uint64_t)each * (uint64_t)step, &weights);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_Format(
            PyExc_IndexError, "%zd runs of %zd bytes, %zd apart from byte %zd, leave an array of %zd bytes", count,
            length, stride, first, data.len);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&low);
    PyBuffer_Release(&high);
    return is_sound ? PyLong_FromUnsignedLongLong(sum) : NULL;
}

/* Added to a number below 2^51 it leaves a whole one in the low bits, rounded half to even. */
#define ROUNDER 6755399441055744.0 /* 1.5 * 2^52 */

static uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Products are by powers of two or of two fp32 numbers, and so exact: fused or not, the result is the same. */
FOR_EACH_PROCESSOR
static void squares_on_grid(const float *values, uint64_t count, double scale, double bin, uint64_t *sums)
{
    uint64_t high = 0, low = 0;
    for (uint64_t i = 0; i < count; i++) {
        double value = values[i], square = value * value * scale, first = square + ROUNDER;
        high += bits_of(first);
        low += bits_of((square - (first - ROUNDER)) * bin + ROUNDER);
    }
    sums[0] = high - count * bits_of(ROUNDER);
    sums[1] = low - count * bits_of(ROUNDER);
}

/* Of numbers without their sign the order is that of their bits; nan is above inf. */
FOR_EACH_PROCESSOR
static uint32_t largest_bits(const uint32_t *values, uint64_t count)
{
    uint32_t found = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = values[i] & UINT32_C(0x7FFFFFFF);
        found = bits > found ? bits : found;
    }
    return found;
}

static int are_floats(const Py_buffer *data)
{
    if (data->len % (Py_ssize_t)sizeof(float) == 0 && (uintptr_t)data->buf % sizeof(float) == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes are no array of fp32 numbers", data->len);
    return 0;
}

static PyObject *squares(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    double scale, bin;
    uint64_t sums[2] = {0, 0};
    int is_sound;
    if (!PyArg_ParseTuple(args, "y*dd", &data, &scale, &bin))
        return NULL;
    is_sound = are_floats(&data);
    if (is_sound) {
        Py_BEGIN_ALLOW_THREADS
        squares_on_grid(data.buf, (uint64_t)data.len / sizeof(float), scale, bin, sums);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return is_sound ? Py_BuildValue("LL", (long long)sums[0], (long long)sums[1]) : NULL;
}

static PyObject *largest(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    uint32_t bits = 0;
    float found;
    int is_sound;
    if (!PyArg_ParseTuple(args, "y*", &data))
        return NULL;
    is_sound = are_floats(&data);
    if (is_sound) {
        Py_BEGIN_ALLOW_THREADS
        bits = largest_bits(data.buf, (uint64_t)data.len / sizeof(float));
        Py_END_ALLOW_THREADS
        if (bits > UINT32_C(0x7F800000))
            bits = UINT32_C(0x7F800000);
        memcpy(&found, &bits, sizeof found);
    }
    PyBuffer_Release(&data);
    return is_sound ? PyFloat_FromDouble(found) : NULL;
}

static PyMethodDef METHODS[] = {
    {"largest", largest, METH_VARARGS, "The largest absolute value of fp32 numbers; inf if one is inf or nan."},
    {"squares", squares, METH_VARARGS, "The squares of fp32 numbers as two sums of integers."},
    {"runs", runs, METH_VARARGS, "The weighted sum, mod 2^64, of equal runs of bytes at equal distances."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "weigh", "Sums, compiled.", 0, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_weigh(void)
{
    return PyModule_Create(&MODULE);
}
