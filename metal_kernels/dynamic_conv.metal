// dynamic_conv: the dynamic convolution around a sublayer, two taps along a block's rows.
//
// C: channels of a group.
// x        float [rows, groups * C]
// base     float [2, 2, groups, C]: side, tap, channel
// dynamic  float [rows, 2 * 2 * groups]: side, tap, group
// side     int, 0 or 1
// y        float [rows, groups * C]
// y[t, c] = (base[side, 0, c] + dynamic[t, side, 0, c / C]) * x[t, c]
//         + (base[side, 1, c] + dynamic[t, side, 1, c / C]) * x[t - 1, c], the latter from row 1 on.
// Order: both coefficients rounded, the product of tap 0 rounded, then one fma with tap 1. A row
// depends on itself and the row before; its bits do not depend on how many rows there are.
// Grid: (channels rounded up to 256, rows, 1) in threadgroups of (256, 1, 1): one value a thread.
//
// The coefficients are made where they are used: as arrays they would be written and read again, at
// twice the bytes of x. Of what is read, only x is read twice, by neighbouring rows, from the cache.

//// body
const uint c = thread_position_in_grid.x;
const uint t = thread_position_in_grid.y;
const uint channels = uint(x_shape[1]);
const uint groups = channels / C;
if (c < channels) {
  const uint tap = uint(side) * 2;
  const uint group = c / C;
  const uint line = t * 4 * groups + group;
  const float now = base[tap * channels + c] + dynamic[line + tap * groups];
  float sum = now * x[t * channels + c];
  if (t > 0) {
    const float before = base[(tap + 1) * channels + c] + dynamic[line + (tap + 1) * groups];
    sum = fma(before, x[(t - 1) * channels + c], sum);
  }
  y[t * channels + c] = sum;
}
