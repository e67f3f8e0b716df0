// What tokens mean: bytes of text, pieces of a SentencePiece model (--tokenizer-model), or, for a file of token ids
// without one, just their numbers.
#pragma once

#include <sentencepiece_processor.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "platform/device.h"

struct Tokenizer {
    std::unique_ptr<sentencepiece::SentencePieceProcessor> model;
    bool bytes = true;  // without a model: bytes, else numbers
    int newline = -1;   // the model's id for the end of a line, which its normalization would drop; -1: it has none

    // Throws UserError.
    void load(const std::string& path) {
        model = std::make_unique<sentencepiece::SentencePieceProcessor>();
        const auto status = model->Load(path);
        if (!status.ok())
            throw UserError("--tokenizer-model " + path +
                            ": is not a readable SentencePiece model: " + status.ToString());
        for (const char* piece : {"\n", "<0x0A>"})
            if (newline < 0 && model->PieceToId(piece) != model->unk_id()) newline = model->PieceToId(piece);
    }

    int64_t vocabulary() const { return model ? model->GetPieceSize() : 256; }

    // The ids of a text; of numbers separated by spaces, if tokens are numbers. Throws UserError.
    std::vector<int32_t> encode(const std::string& text) const {
        std::vector<int32_t> ids;
        if (model) {
            for (size_t begin = 0; begin < text.size();) {
                const size_t end = std::min(text.find('\n', begin), text.size());
                std::vector<int> line;
                const auto status = model->Encode(text.substr(begin, end - begin), &line);
                if (!status.ok()) throw UserError("--tokenizer-model: cannot encode the text: " + status.ToString());
                ids.insert(ids.end(), line.begin(), line.end());
                if (end < text.size() && newline >= 0) ids.push_back(newline);
                begin = end + 1;
            }
        } else if (bytes) {
            for (char c : text) ids.push_back(uint8_t(c));
        } else {
            const char* place = text.c_str();
            char* end = nullptr;
            for (long id = std::strtol(place, &end, 10); end != place; id = std::strtol(place, &end, 10)) {
                ids.push_back(int32_t(std::clamp(id, -1L, long(INT32_MAX))));
                place = end;
            }
            if (std::string(place).find_first_not_of(" \n\t") != std::string::npos)
                throw UserError("\"" + text + "\" must be token ids separated by spaces, or give --tokenizer-model");
        }
        return ids;
    }

    // The text of one token.
    std::string decode(int32_t id) const {
        if (!model) return bytes ? (id < 256 ? std::string(1, char(id)) : "?") : " " + std::to_string(id);
        if (id >= model->GetPieceSize()) return "?";
        if (id == newline) return "\n";
        std::string piece = model->IdToPiece(id);
        if (model->IsByte(id)) return std::string(1, char(std::strtol(piece.c_str() + 3, nullptr, 16)));  // <0xNN>
        const std::string space = "\xe2\x96\x81";  // U+2581 stands for a space
        for (size_t at = piece.find(space); at != std::string::npos; at = piece.find(space, at))
            piece.replace(at, space.size(), " ");
        return piece;
    }
};
