# Sourced: options of the sanitizers' run-time libraries. Nothing is suppressed.
export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=0:allocator_may_return_null=1"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
# Kernels of GPUs that tests run here.
export PLUMB_EMULATOR_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all"
