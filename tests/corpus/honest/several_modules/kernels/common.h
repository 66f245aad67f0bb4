#pragma once
#include <cmath>
#include <cstdint>
