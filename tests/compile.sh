#!/bin/sh
# What tests need compiled, without debug information: that would be a third of the time.
exec c++ "$@" -g0
