"""The optional compiled path. Without it the package is complete; all else stands in pyproject.toml."""

import os
import sysconfig

from setuptools import Extension, setup

# A failed optional build is still named as if it had one: TENSORPIPE_IPC_BUILD=0 makes the pure wheel. Free-threaded builds of
# Python have no stable ABI, and are refused at import.
WANTED = os.environ.get("TENSORPIPE_IPC_BUILD", "1") != "0" and not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "tensorpipe_ipc._compiled",
            ["tensorpipe_ipc/_compiled.c"],
            depends=["tensorpipe_ipc/dlpack.h"],
            extra_compile_args=["-std=c11", "-O2", "-fno-strict-aliasing"],
            define_macros=[("_GNU_SOURCE", None)],
            py_limited_api=True,
            optional=True,
        )
    ]
    if WANTED
    else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if WANTED else {},
)
