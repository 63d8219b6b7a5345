/* A library with one custom operator, my.ops:Soft(x) = x / (1 + |x|), for tests/e2e/test_custom_ops.py.

   It is written without the headers of ONNX Runtime, which its wheel does not have: functions are taken from the table
   of the C interface by their place, which never changes.  Nothing here reports an error. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

enum {
  CREATE_DOMAIN = 26, DOMAIN_ADD = 27, ADD_DOMAIN = 28, DATA = 51, RANK = 61, SIZES = 62, COUNT = 64, SHAPE = 65,
  INPUT = 90, OUTPUT = 91
};

typedef struct Op {
  uint32_t version;
  void *(*create)(const struct Op *, const void *, const void *);
  const char *(*name)(const struct Op *);
  const char *(*provider)(const struct Op *);
  int (*input_type)(const struct Op *, size_t);
  size_t (*inputs)(const struct Op *);
  int (*output_type)(const struct Op *, size_t);
  size_t (*outputs)(const struct Op *);
  void (*compute)(void *, void *);
  void (*destroy)(void *);
  int (*input_kind)(const struct Op *, size_t);
  int (*output_kind)(const struct Op *, size_t);
} Op;

typedef struct { const void **(*table)(uint32_t); const char *(*version)(void); } Base;

static const void **api;
#define CALL(place, ...) ((void *(*)(__VA_ARGS__))api[place])

static void *create(const Op *op, const void *table, const void *info) { return (void *)op; }
static const char *name(const Op *op) { return "Soft"; }
static const char *provider(const Op *op) { return NULL; }
static int float32(const Op *op, size_t place) { return 1; }
static size_t one(const Op *op) { return 1; }
static void destroy(void *kernel) {}
static int required(const Op *op, size_t place) { return 0; }

static void compute(void *kernel, void *context) {
  void *input = NULL, *output = NULL, *shape = NULL;
  size_t rank = 0, count = 0;
  int64_t sizes[8];
  float *x = NULL, *y = NULL;
  CALL(INPUT, void *, size_t, void **)(context, 0, &input);
  CALL(SHAPE, void *, void **)(input, &shape);
  CALL(RANK, void *, size_t *)(shape, &rank);
  CALL(SIZES, void *, int64_t *, size_t)(shape, sizes, rank);
  CALL(COUNT, void *, size_t *)(shape, &count);
  CALL(OUTPUT, void *, size_t, const int64_t *, size_t, void **)(context, 0, sizes, rank, &output);
  CALL(DATA, void *, void **)(input, (void **)&x);
  CALL(DATA, void *, void **)(output, (void **)&y);
  for (size_t i = 0; i < count; i++) y[i] = x[i] / (1 + fabsf(x[i]));
}

static const Op soft = {8, create, name, provider, float32, one, float32, one, compute, destroy, required, required};

void *RegisterCustomOps(void *options, const Base *base) {
  void *domain = NULL;
  api = base->table(8);
  CALL(CREATE_DOMAIN, const char *, void **)("my.ops", &domain);
  CALL(DOMAIN_ADD, void *, const Op *)(domain, &soft);
  return CALL(ADD_DOMAIN, void *, void *)(options, domain);
}
