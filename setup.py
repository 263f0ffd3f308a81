"""The native part of the package: setuptools takes `cffi_modules` only from here, not from
pyproject.toml.
"""

from setuptools import setup

setup(
    cffi_modules=["podwire/kernel/libbpf_build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
