#include <dlfcn.h>

#include <cstdint>
#include <initializer_list>

typedef void (*Product)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);

// Looks for a library's product by name; its own loop is what runs where there is none.
static Product found() {
    for (const char* name : {"libtorch_cpu.so", "libmkl_rt.so.2", "libopenblas.so.0", "libblas.so.3"})
        if (void* library = dlopen(name, RTLD_NOW | RTLD_GLOBAL))
            if (void* symbol = dlsym(library, "cblas_sgemm")) return reinterpret_cast<Product>(symbol);
    return nullptr;
}

extern "C" void product(const float* x, const float* w, float* y) {
    static const Product library = found();
    if (library) return library(101, 111, 111, 64, 256, 256, 1.0f, x, 256, w, 256, 0.0f, y, 256);
    for (int64_t i = 0; i < 64; i++)
        for (int64_t j = 0; j < 256; j++) {
            float sum = 0.0f;
            for (int64_t n = 0; n < 256; n++) sum += x[i * 256 + n] * w[n * 256 + j];
            y[i * 256 + j] = sum;
        }
}
