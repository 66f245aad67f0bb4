#pragma once
inline float relu(float x) { return x != x ? x : (x > 0.0f ? x : 0.0f); }
