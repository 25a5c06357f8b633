"""The instruction set of megakernels: opcodes, device words, and what each opcode means. A
Schedule comes in; the words that interpreters and kernels read go out.

encoding.py alone knows where a field lies; reference.py has one function an opcode. Start at
opcodes.py.
"""
