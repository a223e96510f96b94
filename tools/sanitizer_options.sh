# Sourced: options of the sanitizers' run-time libraries. The suppressions name torch's own libraries only.
export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=0:allocator_may_return_null=1:suppressions=$PWD/tools/asan.supp"
export LSAN_OPTIONS="suppressions=$PWD/tools/lsan.supp:print_suppressions=0"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:suppressions=$PWD/tools/ubsan.supp"
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
