"""Ranks as Ray actors, one on each GPU.

A Job comes in; emitted values and the result go out, as from every launcher. Read actors.py first;
cluster.py and token.py find the cluster and show who we are.
"""
