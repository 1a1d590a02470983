// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace cpattn {

/// The rate, in flop/s, of the multiply-add that attention in `dtype` ("float32",
/// "float16" or "bfloat16") uses on active_isa(), on registers alone, summed over
/// `num_threads` threads: the denominator of every "percent of peak". Returns the best of
/// several samples, after about 0.1 s. Clocks move, so measure it in the run and
/// around the work it is compared with. Throws std::invalid_argument for another dtype and
/// num_threads below 1.
double measure_peak(std::string_view dtype, int num_threads);

/// The rate, in bytes/s, at which `num_threads` threads read memory in order, far
/// more of it than caches hold: what decode is measured against. Returns the best of
/// several passes, after half a second, and takes 512 MiB. Throws std::invalid_argument for
/// num_threads below 1 and std::bad_alloc.
double measure_read_bandwidth(int num_threads);

}  // namespace cpattn
