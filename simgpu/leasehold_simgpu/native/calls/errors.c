/* cuGetErrorName and cuGetErrorString. */
#include "api/driver_types.h"

struct error_text {
    CUresult value;
    const char *name;
    const char *text;
};

static const struct error_text errors[] = {
#define AS_TEXT(name, value, text) {name, #name, text},
    CUDA_ERRORS(AS_TEXT)
#undef AS_TEXT
};

static const struct error_text *find(CUresult result) {
    for (size_t index = 0; index < sizeof errors / sizeof *errors; index++)
        if (errors[index].value == result)
            return &errors[index];
    return NULL;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
    const struct error_text *found = find(error);
    *name = found == NULL ? NULL : found->name;
    return found == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    const struct error_text *found = find(error);
    *text = found == NULL ? NULL : found->text;
    return found == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
