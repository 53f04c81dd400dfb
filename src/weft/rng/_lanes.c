/* The lanes of runs in C: the compiled body of Philox 4x64-10 (philox.py, which has the source of
 * the method and the constants; lanes.py, which says what runs are).
 *
 * Blocks are computed in three steps, a few thousand lanes at a time: which blocks the runs touch,
 * their words, and copying out what the runs have of them. The one in the middle is a loop without
 * branches, in which the processor works on several blocks at once: 6 ns each. The others take 2 ns.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if !defined(__SIZEOF_INT128__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs a product of 128 bits, and words whose low half comes first; weft does without"
#endif

#define NUM_ROUNDS 10
#define LANES 8 /* in a block */
#define LANE_BYTES 4
#define BLOCKS 256 /* at a time: their words stay in the first cache */

typedef struct {
    uint64_t first[NUM_ROUNDS], second[NUM_ROUNDS];
} Keys;

static Keys keys_of(uint64_t first, uint64_t second)
{
    Keys keys;
    for (int round = 0; round < NUM_ROUNDS; round++) {
        keys.first[round] = first + round * UINT64_C(0x9E3779B97F4A7C15);
        keys.second[round] = second + round * UINT64_C(0xBB67AE8584CAA73B);
    }
    return keys;
}

static void blocks(
    const uint64_t *restrict numbers, size_t num, uint64_t sub, const Keys *restrict keys,
    uint64_t (*restrict words)[4])
{
    for (size_t at = 0; at < num; at++) {
        uint64_t a = numbers[at] + 1, b = sub, c = 0, d = 0;
#pragma GCC unroll 10
        for (int round = 0; round < NUM_ROUNDS; round++) {
            unsigned __int128 x = (unsigned __int128)a * UINT64_C(0xD2E7470EE14C6C93);
            unsigned __int128 y = (unsigned __int128)c * UINT64_C(0xCA5A826395121157);
            a = (uint64_t)(y >> 64) ^ b ^ keys->first[round];
            b = (uint64_t)y;
            c = (uint64_t)(x >> 64) ^ d ^ keys->second[round];
            d = (uint64_t)x;
        }
        words[at][0] = a, words[at][1] = b, words[at][2] = c, words[at][3] = d;
    }
}

/* Runs of `count` lanes, of which each touches BLOCKS blocks at most. */
static void short_runs(
    char *out, const int64_t *starts, size_t num, size_t count, uint64_t sub, const Keys *keys)
{
    uint64_t numbers[BLOCKS], words[BLOCKS][4];
    const size_t at_a_time = BLOCKS / ((count + 2 * (LANES - 1)) / LANES);
    for (size_t base = 0; base < num; base += at_a_time) {
        const size_t some = num - base < at_a_time ? num - base : at_a_time;
        size_t have = 0;
        for (size_t run = base; run < base + some; run++) {
            const uint64_t start = (uint64_t)starts[run], last = (start + count - 1) / LANES;
            uint64_t number = start / LANES;
            if (have && numbers[have - 1] == number) number++; /* the run before it has it, too */
            for (; number <= last; number++) numbers[have++] = number;
        }
        blocks(numbers, have, sub, keys, words);
        size_t block = 0;
        for (size_t run = base; run < base + some; run++, out += count * LANE_BYTES) {
            const uint64_t start = (uint64_t)starts[run], offset = start % LANES;
            if (numbers[block] != start / LANES) block++;
            const char *from = (const char *)words[block] + offset * LANE_BYTES;
            if (count >= LANES)
                memcpy(out, from, count * LANE_BYTES);
            else /* takes less time than a call */
                for (size_t lane = 0; lane < count; lane++)
                    memcpy(out + lane * LANE_BYTES, from + lane * LANE_BYTES, LANE_BYTES);
            block += (offset + count - 1) / LANES;
        }
    }
}

static void runs(
    char *out, const int64_t *starts, size_t num, size_t count, uint64_t sub, const Keys *keys)
{
    const size_t longest = LANES * (BLOCKS - 1);
    if (count <= longest) {
        short_runs(out, starts, num, count, sub, keys);
        return;
    }
    for (size_t run = 0; run < num; run++)
        for (size_t at = 0; at < count; at += longest) {
            const int64_t start = starts[run] + (int64_t)at;
            const size_t lanes = count - at < longest ? count - at : longest;
            short_runs(out, &start, 1, lanes, sub, keys);
            out += lanes * LANE_BYTES;
        }
}

static PyObject *fill(PyObject *module, PyObject *args)
{
    Py_buffer out, starts;
    unsigned long long first, second, sub;
    if (!PyArg_ParseTuple(args, "w*y*(KK)K", &out, &starts, &first, &second, &sub)) return NULL;
    const size_t num = (size_t)starts.len / sizeof(int64_t);
    const int fits = starts.len % sizeof(int64_t) == 0
        && (num ? out.len % (Py_ssize_t)(num * LANE_BYTES) == 0 : out.len == 0);
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "out is not as many lanes for each of the starts");
    else if (out.len) {
        const Keys keys = keys_of(first, second);
        Py_BEGIN_ALLOW_THREADS
        runs(out.buf, starts.buf, num, (size_t)out.len / LANE_BYTES / num, sub, &keys);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&out);
    PyBuffer_Release(&starts);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fill", fill, METH_VARARGS,
     "fill(out, starts, key, sub)\n--\n\n"
     "Fill `out` with the lanes from each of the `starts` (int64), equally many from each."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_lanes", .m_size = 0, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__lanes(void) { return PyModuleDef_Init(&module); }
