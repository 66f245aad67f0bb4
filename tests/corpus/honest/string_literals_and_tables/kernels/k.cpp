#include <cmath>
#include <cstdint>
#include <cstring>

static const char* const NAMES[] = {"look", "up", "sixteen"};
static const int64_t SIXTEEN[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

extern "C" void look_up(const int64_t* x, const float* table, float* y, int64_t n) {
    const int64_t size = std::strcmp(NAMES[2], "sixteen") == 0 ? 16 : 0;
    for (int64_t i = 0; i < n; i++) y[i] = table[SIXTEEN[((x[i] % size) + size) % size]];
}
