// Checks the host that a request names: a page of another site whose name leads here (DNS rebinding) names that site.
#pragma once
#include <string>
#include <vector>

namespace funcrec::serving {

// Names that Host may have besides numeric addresses and localhost, which no other site has; `*` for any.
class Hosts {
 public:
  // text: names separated by commas; "" for none, or for any with `any`.
  Hosts(const std::string& text, bool any);
  bool allow(std::string_view host) const;  // the text of Host, with a port or without

 private:
  std::vector<std::string> names_;
  bool any_;
};

}  // namespace funcrec::serving
