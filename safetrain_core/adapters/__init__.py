"""The guards for loops that are not ours: ``huggingface``, ``lightning``, and ``tensorboard`` as a sink of the rows.

Nothing here is imported until it is asked for by name, since each module needs a library of its own.
"""
