#include "plumb/core/table.h"

#include <gtest/gtest.h>

#include <limits>

namespace plumb {
namespace {

TEST(Table, AlignsNamesLeftAndNumbersRight) {
  EXPECT_EQ(to_text({{"run", "loss", "time"}, {{"fp32", "2.15", "31 s"}, {"unit-scaled fp8", "12.1", "4 s"}}}),
            "run              loss  time\n"
            "---------------  ----  ----\n"
            "fp32             2.15  31 s\n"
            "unit-scaled fp8  12.1   4 s\n");
}

TEST(Table, CountsCharactersNotBytes) {
  EXPECT_EQ(to_text({{"µ-P", "x"}, {{"ö", "a"}, {"abcd", "b"}}}),
            "µ-P   x\n"
            "----  -\n"
            "ö     a\n"
            "abcd  b\n");
}

TEST(Table, FillsShortRowsAndTakesLongOnes) {
  EXPECT_EQ(to_text({{"a"}, {{}, {"1", "two"}}}),
            "a\n"
            "-  ---\n"
            "\n"
            "1  two\n");
}

TEST(Table, IsEmptyTextWithoutCells) { EXPECT_EQ(to_text(Table{}), ""); }

TEST(Table, KeepsARowOnOneLine) { EXPECT_EQ(to_text({{}, {{"a\nb\tc", "d"}}}), "a b c  d\n"); }

TEST(Table, IndentsRowsBelowOthers) {
  EXPECT_EQ(to_text({{"layer", "lost"}, {{"a", "3"}, {"a.x", "3"}, {"b", "1"}}, "", {0, 1, 0}}),
            "layer  lost\n-----  ----\na         3\n  a.x     3\nb         1\n");
}

TEST(Table, KnowsNumbersFromNames) {
  Table table{{}, {{"1", "2x", "1 of 3", "nan", "-", ""}, {"-2.5e3 %", "3x", "2", "1e9", "", ""}}};
  EXPECT_TRUE(table.is_numeric(0));
  EXPECT_TRUE(table.is_numeric(1));
  EXPECT_FALSE(table.is_numeric(2));
  EXPECT_TRUE(table.is_numeric(3));
  EXPECT_FALSE(table.is_numeric(4));
  EXPECT_FALSE(table.is_numeric(5));
  EXPECT_FALSE(table.is_numeric(6));
}

TEST(Table, WritesNumbersShort) {
  EXPECT_EQ(short_number(0.031251), "0.03125");
  EXPECT_EQ(short_number(1500000), "1.5e+06");
  EXPECT_EQ(short_number(-std::numeric_limits<double>::quiet_NaN()), "nan");
  EXPECT_EQ(percent(0.1249), "12.5%");
  EXPECT_EQ(percent(1, 0), "100%");
}

}  // namespace
}  // namespace plumb
