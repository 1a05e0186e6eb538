"""A fuzzer of training loops as users write them."""
