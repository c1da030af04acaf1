#!/bin/sh
# What tests need compiled, without debug information: that would be a third of the time. And with few of torch's
# headers, which were three quarters of the rest: headers/torch/extension.h. What needs more of them has them all.
previous='' source=''
for argument; do
    [ "$previous" != -c ] || source=$argument
    previous=$argument
done
if [ -n "$source" ]; then
    few="-I$(dirname "$0")/headers"
    ! grep -q PYBIND11_MODULE "$source" || few="$few -DHAS_BINDINGS"
    c++ $few "$@" -g0 2>/dev/null && exit
fi
exec c++ "$@" -g0
