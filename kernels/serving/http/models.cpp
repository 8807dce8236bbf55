#include "models.h"

#include <algorithm>
#include <filesystem>

#include "../package.h"

namespace funcrec::serving {
namespace {

namespace fs = std::filesystem;
constexpr char MANIFEST[] = "manifest.json";
constexpr size_t MOST = 100;  // bytes of a name

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'); }

// Whether a name is one segment of a path as it is.
bool is_name(const std::string& text) {
  return !text.empty() && text.size() <= MOST && is_letter(text[0]) && std::all_of(text.begin(), text.end(), [](char c) { return is_letter(c) || c == '-' || c == '_' || c == '.'; });
}

bool is_package(const fs::path& path) {
  std::error_code absent;
  return fs::exists(path / MANIFEST, absent);
}

std::string name_of(const fs::path& path) {
  std::error_code error;
  fs::path whole = fs::weakly_canonical(path, error);
  const std::string name = (error ? path : whole).filename().string();
  return is_name(name) ? name : "model";
}

// Returns the folders in a folder, those that are numbers by their number and before all others.
std::vector<fs::path> folders_in(const fs::path& path) {
  std::vector<fs::path> out;
  std::error_code error, absent;
  for (fs::directory_iterator at(path, error), end; !error && at != end; at.increment(error))
    if (at->is_directory(absent) && at->path().filename().string()[0] != '.') out.push_back(at->path());
  const auto key = [](const fs::path& p) {
    const std::string name = p.filename().string();
    const bool is_number = name.find_first_not_of("0123456789") == std::string::npos;
    const std::string digits = is_number ? name.substr(std::min(name.find_first_not_of('0'), name.size())) : name;
    return std::tuple(!is_number, is_number ? digits.size() : 0, digits, name);
  };
  std::sort(out.begin(), out.end(), [&](const fs::path& a, const fs::path& b) { return key(a) < key(b); });
  return out;
}

}  // namespace

std::vector<ModelPlace> places_of(const std::vector<std::string>& words) {
  std::vector<ModelPlace> out;
  for (const std::string& word : words) {
    std::error_code absent;
    const size_t equals = word.find('=');
    const bool is_named = equals != std::string::npos && word.find('/') > equals && !fs::exists(word, absent);
    if (is_named && !is_name(word.substr(0, equals)))
      throw Bad("funcrec-serve: a model has another name", word.substr(0, equals), "letters, digits, - _ and ., at most 100, the first a letter or digit");
    const std::string name = is_named ? word.substr(0, equals) : "", path = is_named ? word.substr(equals + 1) : word;
    std::vector<ModelPlace> inside;
    if (fs::is_directory(path, absent) && !is_package(path)) {
      for (const fs::path& own : folders_in(path)) {
        if (is_package(own)) inside.push_back({is_named ? name : name_of(own), own.string()});
        else if (!is_named)
          for (const fs::path& version : folders_in(own))
            if (is_package(version)) inside.push_back({name_of(own), version.string()});
      }
    }
    if (inside.empty()) inside.push_back({is_named ? name : name_of(path), path});
    out.insert(out.end(), inside.begin(), inside.end());
  }
  return out;
}

}  // namespace funcrec::serving
