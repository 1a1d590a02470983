// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace cpattn {

/// The rate, in flop/s, of the multiply-add that attention in `dtype` ("float32",
/// "float16" or "bfloat16") uses on active_isa(), on registers alone, summed over
/// `num_threads` threads: the denominator of every "percent of peak". Returns the best of
/// several samples, after about 0.1 s. Clock rates change, so measure it in the same run as the
/// work it is compared with, before and after. Throws std::invalid_argument for another dtype and
/// num_threads below 1.
double measure_peak(std::string_view dtype, int num_threads);

/// The rate, in bytes/s, at which `num_threads` threads read memory in order, far more than caches
/// hold: the bound on decode. Returns the best of several passes, after half a second, and takes
/// 512 MiB. Throws std::invalid_argument for num_threads below 1 and std::bad_alloc.
double measure_read_bandwidth(int num_threads);

}  // namespace cpattn
