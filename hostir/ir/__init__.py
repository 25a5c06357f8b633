"""The host program: its nodes, its text, its rules.

Nodes are frozen values; `parse_host(print_host(h)) == h`, and verify.py returns a program that
obeys the rules or names the node that does not. Start at nodes.py; matmul_nodes.py has the node of
a matmul with its collective.
"""
