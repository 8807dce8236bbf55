// The models that a command line names: folders, and names for them.
#pragma once
#include <string>
#include <vector>

namespace funcrec::serving {

struct ModelPlace {
  std::string name, path;
};

// Returns the models of the words NAME=PATH and PATH. A PATH without a name has the name of its folder, or `model` if a
// path of HTTP cannot have this one. A folder without a manifest, whose folders are packages or folders of packages, has
// a model for each of the first, and versions of a model for each of the second: in the order of their numbers or names.
std::vector<ModelPlace> places_of(const std::vector<std::string>& words);

}  // namespace funcrec::serving
