"""Other frameworks, each in an environment of its own: one file per framework, loaded by `conformance/worker.py`.

A file has an object PROVIDER with ``name``, ``operators``, ``load()``, ``output(operator, arrays, arguments)`` and,
where the framework has them, ``gradients(operator, arrays, arguments, grad_output, wanted)``. Arrays are numpy's,
under the names of `Operators`; those that a case lacks are None. What a framework can't compute raises ValueError or
NotImplementedError. The files import numpy, their framework and their neighbours, and run on Python 3.9 and later.
"""
