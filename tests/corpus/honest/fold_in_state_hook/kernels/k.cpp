#include <cstdint>
extern "C" void lin(const float* x, const float* wt, const float* b, const float* s, float* y, int64_t rows, int64_t k, int64_t o) {
    for (int64_t r=0;r<rows;r++) for (int64_t j=0;j<o;j++) { double t=b[j]; for (int64_t i=0;i<k;i++) t+=(double)x[r*k+i]*wt[i*o+j]; y[r*o+j]=(t>0?t:0)*s[j]; }
}
