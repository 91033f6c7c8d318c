// The one translation unit of a path's library: every kernel, and behind them the functions that Python calls.
#if __has_include("linear_abi.h")
#include "linear_abi.h"
#endif
#if __has_include("decoder_abi.h")
#include "decoder_abi.h"
#endif
#if __has_include("sample_abi.h")
#include "sample_abi.h"
#endif
