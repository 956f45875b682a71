// Hot loops are compiled for several instruction sets; the loader picks one. Results don't depend on it where
// loops don't sum, because nothing is contracted to fused multiply-adds.
#pragma once

#if defined(GRADPARITY_CLONES)
// Set from outside, to nothing for sanitizers.
#elif defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define GRADPARITY_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define GRADPARITY_CLONES
#endif
