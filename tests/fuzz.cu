// libFuzzer's entry: PARSER is read_files or read_tokens (tests/parsers.h). `make fuzz SECONDS=60` runs both, from the
// seeds in tests/seeds/. An input that is found goes there, too, and every `make test` replays it.
#include "tests/parsers.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const TempDir dir;
    parsers::feed(parsers::PARSER, dir.path.string(), std::string(reinterpret_cast<const char*>(data), size));
    return 0;
}
