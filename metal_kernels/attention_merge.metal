// The partitions of attention that was split over keys, made one result.
//
// Inputs
//   accumulators    fp32 [partitions, vectors, D]   sum of weight * value of each partition
//   stats           fp32 [partitions, vectors, 2]   flat, at least 8 long: largest dot product of a
//                                                   partition, and sum of its weights
//   scale           fp32, no dimensions             what dot products are multiplied by
// Outputs
//   out             T [vectors, D]
// Template
//   T: float, half or bfloat16_t
// Grid
//   (D, vectors, 1) threads in threadgroups of (D, 1, 1): a thread for each element, so that threads
//   side by side read side by side; no barriers. The accumulators are read once.
//
// Order of operations: the largest of all partitions; then, partition by partition ascending, weight
// w = exp((its largest - largest of all) * scale), total = fma(w, its sum, total) and
// out = fma(w, its accumulator, out); then out / total, rounded to T.
//
// A partition whose sum is 0 saw no key. It is skipped, not multiplied by zero, so that any number
// of them leaves every bit as it was; a sum that is NaN is not skipped. A vector that saw nothing at
// all becomes 0.

//// body
const uint d = thread_position_in_grid.x;
const uint vector = thread_position_in_grid.y;
const uint partitions = uint(accumulators_shape[0]);
const uint vectors = uint(accumulators_shape[1]);
const uint width = uint(accumulators_shape[2]);

float largest = -INFINITY;
for (uint p = 0; p < partitions; ++p) {
  largest = fmax(largest, stats[2 * (p * vectors + vector)]);
}

float total = 0.0f;
float result = 0.0f;
for (uint p = 0; p < partitions; ++p) {
  const uint at = p * vectors + vector;
  const float sum = stats[2 * at + 1];
  if (sum == 0.0f) {
    continue;
  }
  const float own = stats[2 * at];
  const float weight = own == largest ? 1.0f : exp((own - largest) * scale);
  total = fma(weight, sum, total);
  result = fma(weight, accumulators[at * width + d], result);
}
out[vector * width + d] = T(total == 0.0f ? 0.0f : result / total);
