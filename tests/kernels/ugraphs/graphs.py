"""Small uGraphs in f32, one for each form that kernels/ugraphs/source.py writes."""

from tests.superopt.graphs import NORM_LINEAR

GRAPHS = {
    "norm before a linear": NORM_LINEAR.replace("axis m:4", "axis m:16")
    .replace("bf16[", "f32[")
    .replace("grid n:4 m:2 loop k:2", "grid n:2 m:2 loop k:4"),
    "running maximum, extents that are no powers of two": """\
ugraph attention
  axis h:2
  axis g:3
  axis d:24
  axis t:36
  axis e:12
  input q: f32[h, g, d]
  input k: f32[h, t, d]
  input v: f32[h, t, e]
  temp y: f32[h, g, e]
  kernel k0 grid h:2 loop t:3
    load q = q(h, g, d) imap 0 fmap -
    load k = k(h, t, d) imap 0 fmap 1
    load v = v(h, t, e) imap 0 fmap 1
    body s = contract[h, g, t] q k over d
    body m = max[h, g] s over t
    body p = map[h, g, t] 'exp((0.5 * (a0 - a1)))' s m
    body l = sum[h, g] p over t
    body o = contract[h, g, e] p v over t
    after y = map[h, g, e] '(a0 / a1)' o l
    store y omap 0 fmap -
  return y
""",
    "split and combined, in two kernels": """\
ugraph split
  axis h:2
  axis t_o:4
  axis t_i:24
  axis e:8
  input s: f32[h, t_o.t_i]
  input v: f32[h, t_o.t_i, e]
  temp m: f32[h, t_o]
  temp l: f32[h, t_o]
  temp o: f32[h, t_o, e]
  temp y: f32[h, e]
  kernel k0 grid h:2 t_o:4 loop t_i:2
    load s = s(h, t_o.t_i) imap 0 1 fmap 1
    load v = v(h, t_o.t_i, e) imap 0 1 fmap 1
    body m = max[h, t_o] s over t_i
    body p = map[h, t_o, t_i] 'exp((a0 - a1))' s m
    body l = sum[h, t_o] p over t_i
    body o = contract[h, t_o, e] p v over t_i
    store m omap 0 1 fmap -
    store l omap 0 1 fmap -
    store o omap 0 1 fmap -
  kernel k1 grid e:2 loop t_o:2
    load m = m(h, t_o) imap - fmap 1
    load l = l(h, t_o) imap - fmap 1
    load o = o(h, t_o, e) imap 2 fmap 1
    body top = max[h] m over t_o
    body r = map[h, t_o] 'exp((a1 - a0))' top m
    body ll = contract[h] r l over t_o
    body oo = contract[h, e] r o over t_o
    after y = map[h, e] '(a0 / a1)' oo ll
    store y omap 1 fmap -
  return y
""",
    "operands side by side": """\
ugraph joined
  axis m:4
  axis k:32
  axis r:8
  axis n:16
  input x: f32[m, k]
  input z: f32[m, r]
  weight w: f32[n, k]
  weight b: f32[n, r]
  temp y: f32[m, n]
  kernel k0 grid n:2
    load x = x(m, k) imap - fmap -
    load z = z(m, r) imap - fmap -
    load w = w(n, k) imap 0 fmap -
    load b = b(n, r) imap 0 fmap -
    before u = cat[m, k_r] x z over k, r as k_r
    before p = cat[n, k_r] w b over k, r as k_r
    before q = map[n, k_r] 'silu(a0)' p
    before y = contract[m, n] u q over k_r
    store y omap 1 fmap -
  return y
""",
    "extremes, and a result in the loop": """\
ugraph extremes
  axis m:12
  axis k:40
  input x: f32[m, k]
  temp y: f32[m]
  temp z: f32[m, k]
  kernel k0 grid m:3 loop k:2
    load x = x(m, k) imap 0 fmap 1
    body a = max[m] x over k
    body b = min[m] x over k
    body z = map[m, k] 'where(lt(a0, 0.0), (a0 * 0.1), relu(a0))' x
    after y = map[m] '(a0 - a1)' a b
    store z omap 0 fmap 1
    store y omap 0 fmap -
  return y, z
""",
    "columns of many rows, which early blocks ask for": """\
ugraph columns
  axis b:2
  axis k:48
  axis n:64
  input x: f32[b, k]
  weight w: f32[b, k, n]
  temp y: f32[b, n]
  kernel k0 grid b:2 n:4 loop k:3
    load x = x(b, k) imap 0 - fmap 1
    load w = w(b, k, n) imap 0 2 fmap 1
    body v = contract[b, n] x w over k
    after y = map[b, n] 'silu(a0)' v
    store y omap 0 1 fmap -
  return y
""",
}
"""Printed graphs by what they show."""

TURNS = """\
ugraph turns
  axis b:2
  axis d:24
  axis n:36
  input x: f32[b, d]
  weight g: f32[d]
  weight w: f32[n, d]
  temp y: f32[b, n]
  kernel k0 grid n:12
    load x = x(b, d) imap - fmap -
    load g = g(d) imap - fmap -
    load w = w(n, d) imap 0 fmap -
    before v0 = contract[b] x x over d
    before v1 = map[b, d] '(a0 * a1)' x g
    before v2 = contract[b, n] w v1 over d
    before y = map[b, n] '(rsqrt((a0 + 1.0)) * a1)' v0 v2
    store y omap 1 fmap -
  return y
"""
"""Blocks that may be taken in turn: what only x and g make is made once."""
