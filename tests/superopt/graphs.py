"""Texts of uGraphs that tests of the superoptimizer and of its kernels share."""

NORM_LINEAR = """\
ugraph norm_linear
  axis m:4
  axis k:64
  axis n:32
  input x: bf16[m, k]
  weight w: bf16[n, k]
  temp y: bf16[m, n]
  kernel k0 grid n:4 m:2 loop k:2
    load x = x(m, k) imap - 0 fmap 1
    load w = w(n, k) imap 0 - fmap 1
    body s = contract[m] x x over k
    body a = contract[m, n] x w over k
    after y = map[m, n] '(a0 * rsqrt((a1 + 1.0)))' a s
    store y omap 1 0 fmap -
  return y
"""
