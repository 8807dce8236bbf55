// Which server a request says that it is for: a page of another site, whose name was made to lead here, says that name.
#pragma once
#include <string>
#include <vector>

namespace funcrec::serving {

// Names that Host may have besides numbers of addresses and localhost, which no other site has; `*`: any.
class Hosts {
 public:
  // `text`: names with commas between; "": none, or any where `any`.
  Hosts(const std::string& text, bool any);
  bool allow(std::string_view host) const;  // as Host has it, with a port or without

 private:
  std::vector<std::string> names_;
  bool any_;
};

}  // namespace funcrec::serving
